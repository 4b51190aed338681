"use strict";
// From a chart's data to what Plotly draws: one function for each kind of chart. Colours are those of the style sheet.
const Charts = (() => {
  const DASHES = ["solid", "dash", "dot", "dashdot"];
  const MARKED = 60; // points up to which each has a marker
  const LABELLED = 14; // points up to which the headline's values stand beside them
  const MIB = 2 ** 20;

  const colour = name => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  const hover = unit => (unit === "share" ? ".4~p" : unit === "seconds" ? ".4~g" : ".6~g");
  const suffix = unit => ({ bytes: " MiB", MiB: " MiB", GiB: " GiB", seconds: " s" })[unit] || "";

  function figure(value, unit) {
    if (value === null || value === undefined) return "not finite";
    if (unit === "share") return `${Math.abs(value) >= 0.1 ? (100 * value).toFixed(1) : Number((100 * value).toPrecision(3))}%`;
    if (unit === "bytes") return `${(value / MIB).toLocaleString("en", { maximumSignificantDigits: 4 })} MiB`;
    if (value !== 0 && (Math.abs(value) < 0.001 || Math.abs(value) >= 1e9)) return value.toExponential(2);
    return value.toLocaleString("en", { maximumSignificantDigits: 4 });
  }

  // Exponential moving average without the bias of its start (Adam's correction), gaps left out.
  function smoothed(values, weight) {
    let mean = 0, total = 0;
    return values.map(value => {
      if (value === null) return null;
      mean = weight * mean + (1 - weight) * value;
      total = weight * total + (1 - weight);
      return mean / total;
    });
  }

  // The curves of a chart: one for each metric of each run that has it. `place` is its colour where there is one run.
  function curvesOf(chart, data) {
    const several = data.runs.length > 1;
    return data.runs.flatMap((_, run) => chart.series.flatMap((entry, place) => {
      const points = data.series[entry.metric][run];
      if (!points) return [];
      const scale = chart.unit === "bytes" ? 1 / MIB : 1;
      const y = points[1].map(value => (value === null ? null : value * scale));
      const means = points[2] && points[2].map(value => (value === null ? null : value * scale));
      // Validations are few, and each is of many problems: they are not smoothed.
      return [{ run, place, label: entry.label, noisy: !entry.metric.startsWith("val/"), x: points[0], y, means,
        hue: several ? `c${run % 10}` : entry.colour || `c${place % 10}`, dash: several ? DASHES[place % 4] : "solid" }];
    }));
  }

  function lines(chart, data, state) {
    const several = data.runs.length > 1, traces = [];
    const curves = curvesOf(chart, data).filter(curve => !state.hiddenRuns.has(curve.run) && !chart.hidden.has(curve.place));
    for (const curve of curves) {
      const short = curve.x.length <= MARKED, smooth = state.smoothing > 0 && curve.noisy && curve.x.length > 2, hue = colour(curve.hue);
      const labelled = chart.labelled && curves.length === 1 && curve.x.length <= LABELLED && !smooth && !state.narrow;
      const name = [several ? data.runs[curve.run] : "", several && chart.series.length === 1 ? "" : curve.label].filter(Boolean).join(", ");
      traces.push({
        type: "scatter", x: curve.x, y: curve.y, name, connectgaps: false,
        mode: (short ? "lines+markers" : "lines") + (labelled ? "+text" : ""),
        text: labelled ? curve.y.map(value => figure(value, chart.unit)) : undefined,
        textposition: "top center", textfont: { size: 11, color: colour("quiet") }, cliponaxis: false,
        line: { color: hue, width: smooth ? 1 : 2, dash: curve.dash }, marker: { size: 5, color: hue }, opacity: smooth ? 0.3 : 1,
        hovertemplate: `%{y:${hover(chart.unit)}}${suffix(chart.unit)}<extra>${escaped(name)}</extra>`,
      });
      if (smooth) {
        traces.push({ type: "scatter", mode: "lines", x: curve.x, y: smoothed(curve.means || curve.y, state.smoothing), hoverinfo: "skip",
          line: { color: hue, width: 2.2, dash: curve.dash } });
      }
    }
    const layout = base(chart, state);
    layout.xaxis.title = axisTitle("step");
    layout.xaxis.unifiedhovertitle = { text: "step %{x}" };
    const most = Math.max(...curves.flatMap(curve => curve.y.map(Math.abs)));
    layout.yaxis.tickformat = chart.unit === "share" ? ".3~p" : most < 1e-3 ? ".2~e" : ",.6~g";
    layout.yaxis.ticksuffix = suffix(chart.unit);
    if (traces.some(trace => trace.text)) { // room for the first and the last value
      const [{ x }] = curves, room = 0.07 * (x.at(-1) - x[0] || 1);
      layout.xaxis.range = [x[0] - room, x.at(-1) + room];
    }
    zoomed(layout, curves.map(curve => [curve.x, curve.y]), state, chart.labelled ? 0.16 : 0.07);
    return [traces, layout];
  }

  function stack(chart, data, state) {
    const traces = chart.parts.map(part => ({
      type: "bar", x: chart.x, y: part.values, name: part.label, marker: { color: colour(part.colour) },
      visible: chart.hidden.has(part.label) ? "legendonly" : true,
      hovertemplate: `%{y:.4~g} s<extra>${escaped(part.label)}</extra>`,
    }));
    const layout = base(chart, state);
    Object.assign(layout, { barmode: "stack", bargap: 0.15 });
    layout.xaxis.title = axisTitle("step");
    layout.xaxis.unifiedhovertitle = { text: "step %{x}" };
    layout.xaxis.showspikes = false;
    layout.yaxis.ticksuffix = " s";
    if (state.range) layout.xaxis.range = state.range;
    return [traces, layout];
  }

  function histogram(chart, data, state) {
    const traces = chart.parts.map(part => ({
      type: "bar", x: chart.x, y: part.values, name: part.label, marker: { color: colour(part.colour) },
      visible: chart.hidden.has(part.label) ? "legendonly" : true,
      hovertemplate: `%{y}<extra>${escaped(part.label)}</extra>`,
    }));
    const layout = base(chart, state);
    Object.assign(layout, { barmode: "group", bargap: 0.2 });
    layout.xaxis.type = "category";
    layout.xaxis.showspikes = false;
    layout.xaxis.title = axisTitle("tokens");
    layout.xaxis.unifiedhovertitle = { text: "%{x} tokens" };
    layout.dragmode = false;
    return [traces, layout];
  }

  function rows(chart, data, state) {
    const traces = chart.parts.map(part => ({
      type: "bar", orientation: "h", y: chart.rows, x: part.values, name: part.label, marker: { color: colour(part.colour) },
      visible: chart.hidden.has(part.label) ? "legendonly" : true,
      hovertemplate: `%{y}<br>${escaped(part.label)}: <b>%{x:${hover(chart.unit)}}${suffix(chart.unit)}</b><extra></extra>`,
    }));
    const layout = sideways(chart, state, chart.rows);
    layout.barmode = "stack";
    layout.xaxis.tickformat = chart.unit === "share" ? ".0%" : undefined;
    layout.xaxis.ticksuffix = suffix(chart.unit);
    const room = state.narrow ? 1.4 : 1.15;
    if (chart.limit) layout.shapes = [{ type: "line", x0: chart.limit, x1: chart.limit, yref: "paper", y0: 0, y1: 1, line: { color: colour("text"), dash: "dash", width: 1.5 } }];
    if (chart.totals) {
      const ends = chart.rows.map((_, row) => chart.parts.reduce((sum, part) => sum + part.values[row], 0));
      layout.annotations = chart.totals.map((total, row) => ({ x: Math.max(total, ends[row]), y: chart.rows[row], text: `${figure(total)} ${chart.unit}`,
        showarrow: false, xanchor: "left", xshift: 6, font: { size: 12, color: colour("text") } }));
      layout.xaxis.range = [0, room * Math.max(...ends, ...chart.totals, chart.limit || 0)];
    }
    return [traces, layout];
  }

  function gantt(chart, data, state) {
    const traces = chart.parts.map(part => ({
      type: "bar", orientation: "h", name: part.label, 
      marker: { color: colour(part.colour), line: { color: colour("card"), width: part.bars.map(bar => (bar.depth ? 1 : 0)) } },
      y: part.bars.map(bar => chart.rows[bar.row]), base: part.bars.map(bar => bar.begin), x: part.bars.map(bar => bar.seconds),
      width: part.bars.map(bar => Math.max(0.2, 0.8 - 0.28 * bar.depth)), text: part.bars.map(bar => bar.text), textposition: "none",
      visible: chart.hidden.has(part.label) ? "legendonly" : true, hovertemplate: "%{y}<br>%{text}<extra></extra>",
    }));
    const layout = sideways(chart, state, chart.rows);
    layout.barmode = "overlay";
    layout.xaxis.ticksuffix = " s";
    return [traces, layout];
  }

  function sideways(chart, state, names) {
    const layout = base(chart, state);
    layout.height = 34 + (state.narrow ? 24 : 28) * names.length + 30;
    layout.hovermode = "closest";
    Object.assign(layout.xaxis, { showspikes: false, showgrid: true });
    Object.assign(layout.yaxis, { autorange: "reversed", categoryorder: "array", categoryarray: names, type: "category", showgrid: false, nticks: 0, dtick: 1 });
    layout.margin = { l: 10, r: 14, t: 8, b: 34 };
    return layout;
  }

  // What all charts share. Fingers scroll the page; only a mouse zooms, along the steps.
  function base(chart, state) {
    const axis = { gridcolor: colour("grid"), linecolor: colour("line"), zerolinecolor: colour("line"), automargin: true,
      tickfont: { size: 12 }, nticks: state.narrow ? 5 : 8 };
    return {
      height: chart.headline ? 300 : 260, margin: { l: 14, r: 18, t: 14, b: 36 }, showlegend: false,
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: "system-ui, -apple-system, Segoe UI, Roboto, sans-serif", size: 12.5, color: colour("quiet") },
      hovermode: "x unified", hoverlabel: { bgcolor: colour("card"), bordercolor: colour("line"), font: { color: colour("text"), size: 13 } },
      dragmode: state.coarse ? false : "zoom",
      xaxis: { ...axis, showgrid: false, zeroline: false, ticks: "outside", ticklen: 4, tickcolor: colour("line"), fixedrange: state.coarse,
        showspikes: true, spikemode: "across", spikethickness: 1, spikedash: "dot", spikecolor: colour("quiet"), spikesnap: "hovered data" },
      yaxis: { ...axis, nticks: 7, fixedrange: true },
    };
  }

  // The steps that are zoomed into, and values as high and as low as they are there.
  function zoomed(layout, columns, state, room) {
    if (state.range) layout.xaxis.range = state.range;
    const [first, last] = state.range || [-Infinity, Infinity];
    const values = columns.flatMap(([x, y]) => y.filter((value, place) => value !== null && x[place] >= first && x[place] <= last));
    if (!values.length) return;
    const low = values.reduce((a, b) => Math.min(a, b)), high = values.reduce((a, b) => Math.max(a, b));
    const spread = high - low || Math.abs(high) || 1;
    layout.yaxis.range = [low - 0.07 * spread, high + room * spread];
  }

  const axisTitle = text => ({ text, standoff: 4, font: { size: 12 } });
  const escaped = text => text.replace(/[&<>]/g, sign => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;" })[sign]);

  return { draw: { lines, stack, histogram, rows, gantt }, curvesOf, figure, colour, escaped };
})();
