// Draws each picture from the description that stands behind it.
"use strict";
for (const place of document.querySelectorAll(".picture")) {
  const figure = JSON.parse(place.parentElement.querySelector("script").textContent);
  // Room for the numbers behind the bars, which do not shrink with the screen.
  if (figure.data[0].type === "bar" && place.clientWidth < 480) figure.layout.xaxis.range[1] *= 1.25;
  Plotly.newPlot(place, figure.data, figure.layout, { responsive: true, displayModeBar: false });
}
