"use strict";
// The page: unpacks Plotly, draws each chart when it comes into view, and keeps theme, smoothing, zoom and what is hidden.
(async () => {
  const root = document.documentElement, find = id => document.getElementById(id);
  if (!("DecompressionStream" in window)) {
    find("too-old").hidden = false;
    return;
  }
  const data = JSON.parse(find("data").textContent);
  const state = { smoothing: 0, range: null, hiddenRuns: new Set(), narrow: innerWidth < 640, coarse: matchMedia("(pointer: coarse)").matches };
  const places = [...document.querySelectorAll(".chart")];
  const drawn = new Set();

  // Long curves are noisy: they begin smoothed.
  const longest = Math.max(0, ...Object.values(data.series).flatMap(runs => runs.map(points => (points ? points[0].length : 0))));
  state.smoothing = longest > 500 ? 0.9 : longest > 200 ? 0.6 : 0;
  for (const chart of data.charts) chart.hidden = new Set();
  if (data.charts[0]) Object.assign(data.charts[0], { labelled: data.charts[0].kind === "lines" });
  const picked = { kind: "lines", title: "", unit: "number", hidden: new Set(), series: [] };
  const chartOf = place => (place.dataset.chart === "picked" ? picked : data.charts[Number(place.dataset.chart)]);
  const onSteps = chart => chart.kind === "lines" || chart.kind === "stack";

  await unpackPlotly();
  preparePicker();
  prepareControls();
  const seen = new IntersectionObserver(entries => {
    for (const entry of entries) {
      if (!entry.isIntersecting) continue;
      seen.unobserve(entry.target);
      draw(entry.target);
    }
  }, { rootMargin: "300px" });
  places.forEach(place => { place.querySelector(".plot").style.minHeight = "260px"; legend(place); seen.observe(place); });
  document.querySelectorAll(".spark").forEach(spark);
  addEventListener("beforeprint", () => places.forEach(place => drawn.has(place) || draw(place)));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawAll);
  root.dataset.ready = "true";

  // Plotly is in the page, compressed. Its script runs because the page's policy names its hash.
  async function unpackPlotly() {
    const packed = Uint8Array.from(atob(find("plotly").textContent), sign => sign.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
    const script = document.createElement("script");
    script.textContent = await new Response(stream).text();
    document.head.append(script);
    find("plotly").remove();
  }

  function draw(place) {
    const chart = chartOf(place), plot = place.querySelector(".plot");
    const [traces, layout] = Charts.draw[chart.kind](chart, data, state);
    plot.style.minHeight = `${layout.height}px`;
    Plotly.react(plot, traces, layout, { responsive: true, displayModeBar: false, doubleClick: false });
    if (!drawn.has(place)) {
      drawn.add(place);
      plot.on("plotly_relayout", change => chosen(chart, change));
      plot.on("plotly_doubleclick", () => zoom(null));
      place.dataset.drawn = "true";
    }
    plot.setAttribute("aria-label", describe(chart));
  }

  function redrawAll() {
    drawn.forEach(draw);
    document.querySelectorAll(".spark").forEach(spark);
  }

  // A chart was zoomed by its user: the others follow.
  function chosen(chart, change) {
    if (!onSteps(chart) || change["xaxis.range[0]"] === undefined) return;
    zoom([change["xaxis.range[0]"], change["xaxis.range[1]"]]);
  }

  function zoom(range) {
    state.range = range;
    find("reset").hidden = range === null;
    for (const place of drawn) if (onSteps(chartOf(place))) draw(place);
  }

  // The names of a chart's curves or parts with their last values; each is a switch where there are several.
  function legend(place) {
    const chart = chartOf(place), list = place.querySelector(".legend"), several = data.runs.length > 1;
    list.replaceChildren();
    if (chart.kind === "lines") {
      const last = entry => {
        const points = data.series[entry.metric].find(Boolean);
        return Charts.figure(points[1].at(-1), chart.unit);
      };
      if (several && chart.series.length === 1) return;
      chart.series.forEach((entry, number) => {
        const mark = document.createElement("span");
        mark.className = "line";
        mark.style.borderTopColor = several ? "" : `var(--${entry.colour || `c${number % 10}`})`;
        mark.style.borderTopStyle = several ? ["solid", "dashed", "dotted", "dashed"][number % 4] : "solid";
        item(list, chart, place, number, mark, entry.label, several ? "" : last(entry), chart.series.length > 1);
      });
    } else {
      for (const part of chart.parts) {
        const mark = document.createElement("span");
        mark.className = "dot";
        mark.style.background = `var(--${part.colour})`;
        item(list, chart, place, part.label, mark, part.label, "", chart.parts.length > 1);
      }
    }
  }

  function item(list, chart, place, key, mark, label, value, isSwitch) {
    const element = document.createElement(isSwitch ? "button" : "span");
    const strong = document.createElement("b");
    strong.textContent = value;
    element.append(mark, isSwitch || !value ? label : "last", ...(value ? [strong] : []));
    if (!isSwitch) {
      element.className = "fixed";
      mark.remove();
    } else {
      element.type = "button";
      element.setAttribute("aria-pressed", String(!chart.hidden.has(key)));
      element.addEventListener("click", () => {
        if (!chart.hidden.delete(key)) chart.hidden.add(key);
        element.setAttribute("aria-pressed", String(!chart.hidden.has(key)));
        draw(place);
      });
    }
    list.append(element);
  }

  // What a chart shows, for those who do not see it.
  function describe(chart) {
    if (chart.kind !== "lines") return `${chart.title}, ${chart.about}`;
    const texts = Charts.curvesOf(chart, data).map(curve => {
      const unit = chart.unit === "bytes" ? "number" : chart.unit;
      const ends = [0, curve.y.length - 1].map(place => `${Charts.figure(curve.y[place], unit)} at step ${curve.x[place]}`);
      return `${data.runs.length > 1 ? `${data.runs[curve.run]}, ` : ""}${curve.label}: ${ends.join(", ")}`;
    });
    return `${chart.title}: ${texts.join("; ")}`;
  }

  function spark(place) {
    const points = data.series[place.dataset.metric][0], hue = Charts.colour("c0");
    if (points[0].length < 2) return;
    Plotly.react(place, [{ x: points[0], y: points[1], type: "scatter", mode: "lines", line: { color: hue, width: 2.5 }, fill: "tozeroy",
      fillcolor: `${hue}1f` }],
    { height: 90, margin: { l: 0, r: 0, t: 4, b: 2 }, xaxis: { visible: false }, yaxis: { visible: false }, showlegend: false,
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)" }, { staticPlot: true, responsive: true });
  }

  function preparePicker() {
    const select = find("pick"), names = Object.keys(data.series);
    if (!select) return;
    names.forEach(name => select.append(new Option(name, name)));
    const pick = () => {
      picked.title = select.value;
      picked.about = "";
      picked.series = [{ metric: select.value, label: select.value }];
      legend(find("picked"));
      if (drawn.has(find("picked"))) draw(find("picked"));
    };
    select.addEventListener("change", pick);
    pick();
  }

  function prepareControls() {
    find("theme").addEventListener("click", () => {
      const dark = getComputedStyle(root).colorScheme === "dark" || (!root.dataset.theme && matchMedia("(prefers-color-scheme: dark)").matches);
      root.dataset.theme = dark ? "light" : "dark";
      redrawAll();
    });
    addEventListener("resize", () => {
      const narrow = innerWidth < 640;
      if (narrow !== state.narrow) { state.narrow = narrow; redrawAll(); }
    });
    if (!find("smoothing")) return;
    find("smoothing").value = state.smoothing;
    find("smoothed").textContent = state.smoothing;
    find("smoothing").addEventListener("input", event => {
      state.smoothing = Number(event.target.value);
      find("smoothed").textContent = event.target.value;
      for (const place of drawn) if (chartOf(place).kind === "lines") draw(place);
    });
    find("reset").addEventListener("click", () => zoom(null));
    data.runs.forEach((name, run) => {
      if (!find("runs")) return;
      const mark = document.createElement("span"), button = document.createElement("button");
      mark.className = "dot";
      mark.style.background = `var(--c${run % 10})`;
      button.type = "button";
      button.append(mark, name);
      button.setAttribute("aria-pressed", "true");
      button.addEventListener("click", () => {
        if (!state.hiddenRuns.delete(run)) state.hiddenRuns.add(run);
        button.setAttribute("aria-pressed", String(!state.hiddenRuns.has(run)));
        for (const place of drawn) if (chartOf(place).kind === "lines") draw(place);
      });
      find("runs").append(button);
    });
  }
})();
