"""The GPU that a benchmark ran on: what it is, and its clocks and power while it runs."""

from __future__ import annotations

import contextlib
import subprocess
from typing import Any

# Names of nvidia-smi --query-gpu, which are those of the results.
_FIXED = {
    "name": "name",
    "driver": "driver_version",
    "power_limit_w": "power.limit",
    "max_sm_mhz": "clocks.max.sm",
    "max_memory_mhz": "clocks.max.memory",
}
_MOVING = {
    "sm_mhz": "clocks.sm",
    "memory_mhz": "clocks.mem",
    "power_w": "power.draw",
    "temperature_c": "temperature.gpu",
}


def _number(text: str) -> float | str:
    with contextlib.suppress(ValueError):
        value = float(text)
        return int(value) if value.is_integer() else value
    return text


class Gpu:
    """Reads one GPU by NVML if its Python package is installed, else by nvidia-smi. Changes no setting."""

    def __init__(self, index: int, uuid: str | None = None) -> None:
        # CUDA and NVML number GPUs differently; the UUID is common to both.
        self._which = f"GPU-{uuid}" if uuid else str(index)
        self._nvml: Any = None
        self._handle: Any = None
        try:
            import pynvml

            pynvml.nvmlInit()
            self._handle = (
                pynvml.nvmlDeviceGetHandleByUUID(self._which) if uuid else pynvml.nvmlDeviceGetHandleByIndex(index)
            )
            self._nvml = pynvml
        except Exception:  # noqa: BLE001  no package, no library, or a container that hides NVML
            self._nvml = None

    def _smi(self, fields: dict[str, str]) -> dict[str, Any]:
        command = ["nvidia-smi", "-i", self._which, f"--query-gpu={','.join(fields.values())}"]
        try:
            done = subprocess.run(
                [*command, "--format=csv,noheader,nounits"], check=True, capture_output=True, text=True, timeout=20
            )
        except (OSError, subprocess.SubprocessError):
            return {}
        values = [value.strip() for value in done.stdout.strip().split("\n")[0].split(",")]
        return {name: _number(value) for name, value in zip(fields, values, strict=False)}

    def about(self) -> dict[str, Any]:
        return self._smi(_FIXED)

    def _milliwatts(self) -> float:
        """Power now if the driver reports it, else the mean of the last second."""
        n = self._nvml
        with contextlib.suppress(Exception):
            value = n.nvmlDeviceGetFieldValues(self._handle, [n.NVML_FI_DEV_POWER_INSTANT])[0]
            if value.nvmlReturn == n.NVML_SUCCESS:
                return float(value.value.uiVal)
        return float(n.nvmlDeviceGetPowerUsage(self._handle))

    def reading(self) -> dict[str, Any]:
        """Clocks, power and temperature now."""
        n, handle = self._nvml, self._handle
        if n is None:
            return self._smi(_MOVING)
        readers = {
            "sm_mhz": lambda: n.nvmlDeviceGetClockInfo(handle, n.NVML_CLOCK_SM),
            "memory_mhz": lambda: n.nvmlDeviceGetClockInfo(handle, n.NVML_CLOCK_MEM),
            "power_w": lambda: round(self._milliwatts() / 1000),
            "temperature_c": lambda: n.nvmlDeviceGetTemperature(handle, n.NVML_TEMPERATURE_GPU),
        }
        found = {}
        for name, read in readers.items():
            with contextlib.suppress(Exception):
                found[name] = read()
        return found
