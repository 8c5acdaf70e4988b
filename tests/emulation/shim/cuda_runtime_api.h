// The runtime for builds with an emulated device: what src/cuda/launch and the tests use of it.
#pragma once

#include <cstddef>

#include "cuda.h"

#define CUDART_VERSION 13000

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorMemoryAllocation = 2,
  cudaErrorInsufficientDriver = 35,
  cudaErrorInvalidDeviceFunction = 98,
  cudaErrorNoDevice = 100,
  cudaErrorNoKernelImageForDevice = 209,
  cudaErrorUnsupportedPtxVersion = 222,
  cudaErrorNotReady = 600,
  cudaErrorPeerAccessAlreadyEnabled = 704,
};
enum cudaMemcpyKind { cudaMemcpyHostToDevice = 1, cudaMemcpyDeviceToHost = 2, cudaMemcpyDefault = 4 };
enum cudaDeviceAttr { cudaDevAttrL2CacheSize = 38 };
enum cudaFuncAttribute {
  cudaFuncAttributeMaxDynamicSharedMemorySize = 8,
  cudaFuncAttributeNonPortableClusterSizeAllowed = 13
};
enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone = 0 };
enum cudaStreamCaptureMode { cudaStreamCaptureModeGlobal = 0, cudaStreamCaptureModeRelaxed = 2 };
enum cudaDriverEntryPointQueryResult {
  cudaDriverEntryPointSuccess = 0,
  cudaDriverEntryPointSymbolNotFound = 1
};
inline constexpr unsigned cudaEnableDefault = 0, cudaEnableLegacyStream = 1, cudaStreamNonBlocking = 1;

struct cudaFuncAttributes {
  size_t sharedSizeBytes;
  int ptxVersion;
};
struct cudaDeviceProp {
  char name[256];
  int major, minor, multiProcessorCount, maxThreadsPerMultiProcessor;
  size_t sharedMemPerMultiprocessor, sharedMemPerBlockOptin, totalGlobalMem;
};
using cudaStream_t = CUstream;
using cudaFunction_t = CUfunction;
using cudaEvent_t = char*;
inline constexpr unsigned cudaEventDisableTiming = 2;

const char* cudaGetErrorString(cudaError_t error);
cudaError_t cudaGetLastError();
cudaError_t cudaRuntimeGetVersion(int* version);
cudaError_t cudaDriverGetVersion(int* version);
cudaError_t cudaGetDeviceCount(int* count);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device);
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int device);
cudaError_t cudaDeviceSynchronize();
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** pointer, unsigned version,
                                             unsigned long long flags,
                                             cudaDriverEntryPointQueryResult* found);
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* kernel);
cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute which, int value);
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* ctas, const void* kernel, int threads,
                                                          size_t shared);
cudaError_t cudaGetFuncBySymbol(cudaFunction_t* function, const void* kernel);
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags);
cudaError_t cudaStreamDestroy(cudaStream_t stream);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode);  // nothing is ever captured
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status);
cudaError_t cudaMalloc(void** memory, size_t size);
cudaError_t cudaFree(void* memory);
cudaError_t cudaMallocAsync(void** memory, size_t size, cudaStream_t stream);
cudaError_t cudaFreeAsync(void* memory, cudaStream_t stream);
cudaError_t cudaMallocHost(void** memory, size_t size);
cudaError_t cudaFreeHost(void* memory);
cudaError_t cudaMemcpy(void* to, const void* from, size_t size, cudaMemcpyKind kind);
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t size, cudaMemcpyKind kind,
                            cudaStream_t stream);
cudaError_t cudaMemset(void* to, int value, size_t size);
cudaError_t cudaMemsetAsync(void* to, int value, size_t size, cudaStream_t stream);
cudaError_t cudaMemcpyPeerAsync(void* to, int to_device, const void* from, int from_device, size_t size,
                                cudaStream_t stream);
cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                              size_t height, cudaMemcpyKind kind, cudaStream_t stream);
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest);
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority);
struct cudaIpcMemHandle_t {
  char reserved[64];
};
cudaError_t cudaDeviceGetPCIBusId(char* bus, int size, int device);
inline constexpr unsigned cudaIpcMemLazyEnablePeerAccess = 1;
// There is one process: ranks are threads.
cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* memory);
cudaError_t cudaIpcOpenMemHandle(void** memory, cudaIpcMemHandle_t handle, unsigned flags);
cudaError_t cudaIpcCloseMemHandle(void* memory);
cudaError_t cudaDeviceCanAccessPeer(int* possible, int device, int from_device);  // there is one device
cudaError_t cudaDeviceEnablePeerAccess(int from_device, unsigned flags);
// Work is done when the call that asks for it returns, so events have nothing to tell.
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags);
cudaError_t cudaEventDestroy(cudaEvent_t event);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream);
cudaError_t cudaEventQuery(cudaEvent_t event);
cudaError_t cudaEventSynchronize(cudaEvent_t event);
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags);
