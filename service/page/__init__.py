"""The live page at `GET /`: `index.html`, `page.css`, `page.js`, and uPlot, which draws the chart. No build step."""
