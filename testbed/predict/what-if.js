// The page: reads the sliders, computes every curve with model.js, draws them and says in words where they cross.
(() => {
  "use strict";
  const $ = (id) => document.getElementById(id), SVG = "http://www.w3.org/2000/svg";
  const DASHES = ["", "7 4", "2 3", "9 3 2 3", "4 2 1 2"], BUCKETS = [null, 18, 19, 20, 21, 22, 23, 24, 25, 26];
  const BAND = [0.05, 0.95], GOOD = 0.9, EQUAL = 1.01, hidden = new Set();
  const used = {};
  for (const mode of data.modes) {
    mode.rounds = mode.key === null ? null : data.rounds[mode.key] || {};
    mode.dash = DASHES[(used[mode.colour] = (used[mode.colour] ?? -1) + 1) % DASHES.length];
  }
  const baseRate = data.base.rate || data.wire.rate * 8 / data.efficiency;
  const measuredTo = Math.max(data.base.nodes, ...data.measured.map((each) => each.nodes));

  // --- numbers in words ---

  const three = (value) => value >= 1000 ? value.toFixed(0) : String(+value.toPrecision(3));
  const rateText = (bit) => bit >= 1e9 ? `${three(bit / 1e9)} Gbit/s` : `${three(bit / 1e6)} Mbit/s`;
  const sizeText = (bytes) => bytes >= 1e9 ? `${three(bytes / 1e9)} GB` : `${three(bytes / 1e6)} MB`;
  const secondsText = (s) => s >= 1 ? `${three(s)} s` : `${three(1000 * s)} ms`;
  const percent = (share) => `${(100 * share).toFixed(share < 0.1 ? 1 : 0)} %`;
  function durationText(seconds) {
    if (seconds < 90) return `${three(seconds)} s`;
    return seconds < 5400 ? `${three(seconds / 60)} min` : `${three(seconds / 3600)} h`;
  }

  // --- what the sliders say ---

  function settings() {
    const speed = 10 ** +$("speed").value, size = 10 ** +$("size").value;
    const rate = 10 ** +$("rate").value, asked = Math.abs(rate / baseRate - 1) < 0.03 ? null : rate;
    const delay = +$("delay").value === 0 ? 0 : 0.0001 * 10 ** (+$("delay").value / 25);
    const power = BUCKETS[+$("bucket").value];
    return { nodes: data.nodes[+$("nodes").value], rate: asked, delay: delay === 0 && !data.base.delay ? null : delay,
      speed: Math.abs(speed - 1) < 0.03 ? 1 : speed, size: Math.abs(size - 1) < 0.03 ? 1 : size,
      bucket: power === null ? null : 2 ** power };
  }
  const delayPlace = (seconds) => seconds < 0.0001 ? 0 : Math.round(25 * Math.log10(seconds / 0.0001));

  function reset() {
    $("nodes").max = data.nodes.length - 1;
    $("nodes").value = Math.max(0, data.nodes.findIndex((n) => n >= Math.max(16, data.base.nodes)));
    [$("rate").min, $("rate").max] = [7, 11];
    $("rate").step = "any";
    $("rate").value = Math.log10(baseRate);
    $("delay").value = delayPlace(data.base.delay);
    for (const id of ["speed", "size", "bucket"]) $(id).value = 0;
  }

  function withBucket(mode, bucket) {
    return bucket !== null && (mode.granularity === "bucket" || mode.reference) ? { ...mode, bucket } : mode;
  }

  // One mode at one number of nodes, with the parameters of a draw or the most likely ones.
  function at(mode, nodes, set, draw) {
    if (mode.rounds && nodes > 1 && !mode.rounds[nodes]) return null;
    const given = draw || { compute: 1, node: data.node, wire: data.wire };
    const factor = given.compute, work = set.work;
    const scaled = factor === 1 ? work : { ...work, before: work.before * factor, after: work.after * factor,
      update: work.update * factor, forward: work.forward.map((s) => s * factor), backward: work.backward.map((s) => s * factor) };
    const wire = model.wireAt(data, given.wire, set.rate, set.delay);
    return model.predict(scaled, { ...given.node, speed: set.speed }, wire, withBucket(mode, set.bucket), nodes);
  }

  function bandOf(mode, nodes, set, seconds) {
    const steps = data.draws.map((draw) => at(mode, nodes, set, draw).seconds).sort((a, b) => a - b);
    const [low, high] = BAND.map((share) => model.quantile(steps, share)), off = mode.misfit * seconds;
    return [seconds - Math.hypot(seconds - Math.min(low, seconds), off), seconds + Math.hypot(Math.max(high, seconds) - seconds, off)];
  }

  function measure(metric, step, nodes, alone) {
    if (metric === "seconds") return step.seconds;
    if (metric === "exposed") return Math.max(0, step.seconds - step.compute) / step.seconds;
    return (metric === "speedup" ? nodes : 1) * alone / step.seconds;
  }

  // --- curves ---

  let curves = [], bands = [], timer = 0, current = null;

  function compute(set) {
    set.work = set.size === 1 ? data.work : model.resized(data.work, set.size);
    set.alone = model.computeOf(set.work) / set.speed;
    curves = data.modes.map((mode) => data.nodes.filter((n) => n > 1).map((nodes) => ({ nodes, step: at(mode, nodes, set) }))
      .filter((point) => point.step));
    bands = [];
  }

  // Bands take sixteen times as long as curves: they are computed when the sliders rest, one mode at a time.
  function computeBands(set, k = 0) {
    bands[k] = curves[k].map(({ nodes, step }) => ({ nodes, step, band: bandOf(data.modes[k], nodes, set, step.seconds) }));
    draw(set);
    if (k + 1 < curves.length) timer = setTimeout(() => computeBands(set, k + 1));
  }

  function refresh() {
    const set = current = settings();
    compute(set);
    texts(set);
    draw(set);
    table(set);
    words(set);
    clearTimeout(timer);
    timer = setTimeout(() => { table(set, true); computeBands(set); }, 120);
  }

  function texts(set) {
    $("nodes-text").value = set.nodes;
    $("rate-text").value = rateText(set.rate ?? baseRate);
    $("delay-text").value = set.delay === null ? (data.base.delay ? secondsText(data.base.delay) : "as measured") : set.delay ? secondsText(set.delay) : "none";
    $("speed-text").value = set.speed === 1 ? "as measured" : `${three(set.speed)} x`;
    $("size-text").value = sizeText(set.work.size);
    $("bucket-text").value = set.bucket === null ? "as named" : `${set.bucket >= 2 ** 20 ? `${set.bucket / 2 ** 20} MiB` : `${set.bucket / 1024} KiB`}`;
  }

  // --- the chart ---

  function element(name, attributes, parent, text) {
    const made = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text !== undefined) made.textContent = text;
    if (parent) parent.append(made);
    return made;
  }

  function ticks(low, high, logarithmic) {
    const found = [];
    if (!logarithmic) {
      const raw = (high - low) / 5, power = 10 ** Math.floor(Math.log10(raw)), unit = [1, 2, 5, 10].find((u) => u * power >= raw) * power;
      for (let value = Math.ceil(low / unit) * unit; value <= high * 1.0001; value += unit) found.push(value);
      return found;
    }
    for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++)
      for (const lead of Math.log10(high / low) > 3 ? [1] : [1, 2, 5])
        if (lead * 10 ** power >= low * 0.999 && lead * 10 ** power <= high * 1.001) found.push(lead * 10 ** power);
    return found;
  }

  function draw(set) {
    const metric = $("metric").value, wide = Math.max(300, $("plot").clientWidth), high = wide < 520 ? 300 : 400;
    const logarithmic = metric === "seconds" || metric === "speedup";
    const names = wide >= 620, left = 52, right = names ? 176 : 12, top = 10, bottom = 40;
    const shown = curves.map((points, k) => hidden.has(k) ? [] : points.map((p) => [p.nodes, measure(metric, p.step, p.nodes, set.alone)]));
    const values = shown.flat().map(([, y]) => y).concat(metric === "speedup" ? [1] : []);
    if (!values.length) values.push(1);
    const [low, top_] = logarithmic ? [Math.min(...values) * 0.85, Math.max(...values) * 1.15] : [0, Math.min(1.02, Math.max(...values) * 1.08) || 1];
    const nodesFrom = 2, nodesTo = data.nodes[data.nodes.length - 1];
    const x = (n) => left + (wide - left - right) * Math.log(n / nodesFrom) / Math.log(nodesTo / nodesFrom);
    const share = (v) => logarithmic ? Math.log(Math.max(v, low) / low) / Math.log(top_ / low) : (v - low) / (top_ - low);
    const y = (v) => high - bottom - (high - bottom - top) * Math.min(1, share(v));
    const svg = element("svg", { viewBox: `0 0 ${wide} ${high}`, role: "img", "aria-label": $("chart-title").textContent });
    element("rect", { class: "beyond", x: x(Math.max(measuredTo, nodesFrom)), y: top, width: Math.max(0, x(nodesTo) - x(measuredTo)), height: high - bottom - top }, svg);
    for (const value of ticks(low, top_, logarithmic)) {
      element("line", { class: "grid", x1: left, x2: wide - right, y1: y(value), y2: y(value) }, svg);
      const text = metric === "efficiency" || metric === "exposed" ? `${Math.round(100 * value)} %` : three(value);
      element("text", { x: left - 7, y: y(value) + 4, "text-anchor": "end" }, svg, text);
    }
    for (let n = 2; n <= nodesTo; n *= wide < 420 ? 4 : 2) element("text", { x: x(n), y: high - bottom + 17, "text-anchor": "middle" }, svg, n);
    element("line", { class: "axis", x1: left, x2: wide - right, y1: high - bottom, y2: high - bottom }, svg);
    element("text", { x: (left + wide - right) / 2, y: high - 5, "text-anchor": "middle" }, svg, "nodes");
    const room = x(nodesTo) - x(measuredTo), told = room > 240 ? `measured up to ${measuredTo}, extrapolated beyond` : "extrapolated";
    if (room > 90) element("text", { x: x(measuredTo) + 6, y: top + 13 }, svg, told);
    drawBands(svg, set, metric, x, y);
    shown.forEach((points, k) => {
      const mode = data.modes[k], path = points.map(([n, v], p) => `${p ? "L" : "M"}${x(n).toFixed(1)} ${y(v).toFixed(1)}`).join("");
      if (path) element("path", { class: "line", d: path, stroke: `var(--${mode.colour})`, "stroke-dasharray": mode.dash, "data-mode": k }, svg);
    });
    drawMeasured(svg, set, metric, x, y);
    if (names) nameCurves(svg, shown, x, y, top, high - bottom);
    element("line", { class: "here", x1: x(Math.max(2, set.nodes)), x2: x(Math.max(2, set.nodes)), y1: top, y2: high - bottom }, svg);
    svg.addEventListener("pointerdown", (event) => {
      const box = svg.getBoundingClientRect(), place = (event.clientX - box.left) * wide / box.width;
      const wanted = nodesFrom * Math.exp((place - left) / (wide - left - right) * Math.log(nodesTo / nodesFrom));
      const distance = (n) => Math.abs(Math.log(n / wanted));
      $("nodes").value = data.nodes.reduce((best, n, k) => distance(n) < distance(data.nodes[best]) ? k : best, 0);
      refresh();
    });
    $("plot").replaceChildren(svg);
    const titles = { seconds: "Seconds a step", speedup: "Speed-up over one node", efficiency: "Efficiency: speed-up over nodes", exposed: "Share of a step that waits for communication" };
    $("chart-title").textContent = titles[metric];
    const points = data.measured.filter((each) => fits(each, set)).length, all = data.measured.filter((each) => each.nodes > 1).length;
    $("reading").textContent = `Circles: ${points} of ${all} measured points are for these settings. Pale areas: 90 % bands. Click the chart to choose the nodes, a row below to hide its curve.`;
  }

  function drawBands(svg, set, metric, x, y) {
    if (metric === "exposed") return;
    bands.forEach((points, k) => {
      if (hidden.has(k)) return;
      const edge = (side) => points.map(({ nodes, band, step }) => {
        const value = measure(metric, { ...step, seconds: Math.max(1e-9, band[side]) }, nodes, set.alone);
        return `${x(nodes).toFixed(1)} ${y(value).toFixed(1)}`;
      });
      const path = [...edge(1), ...edge(0).reverse()];
      if (path.length) element("path", { class: "band", d: `M${path.join("L")}Z`, fill: `var(--${data.modes[k].colour})` }, svg);
    });
  }

  const near = (a, b) => Math.abs(a - b) <= 0.03 * Math.max(a, b, 1e-9);
  function fits(each, set) {
    const rate = each.rate === null ? !data.base.rate && set.rate === null : near(each.rate, set.rate ?? baseRate);
    return each.nodes > 1 && rate && near(each.delay, set.delay ?? data.base.delay) && set.speed === 1 && set.size === 1
      && data.modes.some((mode) => mode.name === each.mode && withBucket(mode, set.bucket) === mode);
  }

  function drawMeasured(svg, set, metric, x, y) {
    if (metric === "exposed") return;
    for (const each of data.measured.filter((found) => fits(found, set))) {
      const k = data.modes.findIndex((mode) => mode.name === each.mode), colour = `var(--${data.modes[k].colour})`;
      if (hidden.has(k)) continue;
      const place = (seconds) => y(measure(metric, { seconds, compute: 0 }, each.nodes, set.alone));
      element("line", { x1: x(each.nodes), x2: x(each.nodes), y1: place(each.low), y2: place(each.high), stroke: colour, "stroke-width": 2 }, svg);
      const dot = element("circle", { cx: x(each.nodes), cy: place(each.seconds), r: 4.5, fill: "var(--card)", stroke: colour, "stroke-width": 2.4 }, svg);
      element("title", {}, dot, `${each.mode}, ${each.nodes} nodes: ${secondsText(each.seconds)} ${each.emulated ? "with emulated compute" : "measured"}`);
    }
  }

  // Names at the right end of the curves, moved apart where they would overlap.
  function nameCurves(svg, shown, x, y, top, foot) {
    const ends = shown.map((points, k) => ({ k, at: points.length ? y(points[points.length - 1][1]) : null })).filter((each) => each.at !== null);
    ends.sort((a, b) => a.at - b.at);
    ends.forEach((each, place) => { if (place) each.at = Math.max(each.at, ends[place - 1].at + 14); });
    for (let place = ends.length - 1, limit = foot; place >= 0; place--, limit = ends[place + 1].at - 14) ends[place].at = Math.max(top + 4, Math.min(ends[place].at, limit));
    for (const { k, at: place } of ends) {
      const mode = data.modes[k], last = shown[k][shown[k].length - 1];
      const text = element("text", { class: "name", x: x(last[0]) + 8, y: place + 4 }, svg, short(mode.name));
      text.style.fill = `var(--${mode.colour})`;
    }
  }
  const short = (name) => name.length > 24 ? `${name.slice(0, 23)}…` : name;

  // --- the table ---

  function table(set, withBands = false) {
    const rows = data.modes.map((mode, k) => ({ mode, k, step: at(mode, set.nodes, set) })).filter((row) => row.step && (set.nodes > 1 || !row.mode.rounds || row.k === 0));
    rows.sort((a, b) => a.step.seconds - b.step.seconds);
    const samples = +$("samples").value || 0, cost = +$("cost").value || 0, best = rows.find((row) => row.mode.exact) || rows[0];
    $("modes").tBodies[0].replaceChildren(...rows.map((row) => {
      const { mode, k, step } = row, band = withBands && set.nodes > 1 ? bandOf(mode, set.nodes, set, step.seconds) : null;
      const epoch = samples ? samples / (data.batch * set.nodes) * step.seconds : null;
      const line = document.createElement("tr"), head = document.createElement("th"), swatch = document.createElementNS(SVG, "svg");
      head.scope = "row";
      swatch.setAttribute("class", "swatch");
      element("line", { x1: 0, x2: 22, y1: 5, y2: 5, stroke: `var(--${mode.colour})`, "stroke-width": 3, "stroke-dasharray": mode.dash }, swatch);
      head.append(swatch, set.nodes > 1 ? mode.name : "one node");
      line.append(head);
      const cells = [three(step.seconds), band ? `${three(band[0])} to ${three(band[1])}` : "…", three(set.nodes * set.alone / step.seconds),
        percent(set.alone / step.seconds), percent(Math.max(0, step.seconds - step.compute) / step.seconds),
        epoch === null ? "-" : durationText(epoch), epoch !== null && cost ? three(epoch / 3600 * set.nodes * cost) : "-"];
      for (const text of cells) line.insertCell().textContent = text;
      line.className = `${row === best ? "best" : ""}${hidden.has(k) ? " off" : ""}`;
      line.addEventListener("click", () => { if (!hidden.delete(k)) hidden.add(k); draw(set); line.classList.toggle("off"); });
      return line;
    }));
    $("here-title").textContent = `${set.nodes} node${set.nodes > 1 ? "s" : ""} at ${rateText(set.rate ?? baseRate)}`;
    if (best && set.nodes > 1)
      $("headline").textContent = `${set.nodes} nodes at ${rateText(set.rate ?? baseRate)}: ${best.mode.name} is the fastest exact mode, ${secondsText(best.step.seconds)} a step and ${percent(set.alone / best.step.seconds)} efficient.`;
    else $("headline").textContent = `One node takes ${secondsText(set.alone)} a step.`;
  }

  // --- crossings in words ---

  function words(set) {
    const said = [], efficiency = (point) => set.alone / point.step.seconds;
    const exact = data.modes.map((mode, k) => ({ mode, points: curves[k] })).filter(({ mode, points }) => mode.exact && mode.rounds && points.length);
    if (exact.length > 1) said.push(...winners(exact));
    data.modes.forEach((mode, k) => {
      const points = curves[k];
      if (!mode.rounds || !points.length) return;
      const gain = points.map((point) => point.nodes * efficiency(point)), most = gain.indexOf(Math.max(...gain));
      if (most < points.length - 1 && gain[most] > 1.05 * gain[gain.length - 1])
        said.push(`${mode.name} stops gaining at ${points[most].nodes} nodes: ${three(gain[most])} times the images per second of one node.`);
      else if (gain[most] <= 1) said.push(`${mode.name} is never faster than one node.`);
      const held = points.filter((point) => efficiency(point) >= GOOD);
      if (held.length && held.length < points.length) said.push(`${mode.name} is at least ${percent(GOOD)} efficient up to ${held[held.length - 1].nodes} nodes.`);
      else if (held.length) said.push(`${mode.name} is at least ${percent(GOOD)} efficient on all ${points[points.length - 1].nodes} nodes.`);
      const waits = points.find((point) => latencyShare(mode, point, set) > 0.5);
      if (waits) said.push(`From ${waits.nodes} nodes on ${mode.name} waits mostly for messages, not for their bytes: a higher rate would hardly help.`);
    });
    $("sentences").replaceChildren(...said.map((text) => Object.assign(document.createElement("li"), { textContent: text })));
  }

  // The share of the exposed time that is left on an infinitely fast network.
  function latencyShare(mode, { nodes, step }, set) {
    const exposed = step.seconds - step.compute;
    if (exposed < 0.02 * step.seconds) return 0;
    const fast = at(mode, nodes, { ...set, rate: 1e15 });
    return (fast.seconds - fast.compute) / exposed;
  }

  function winners(exact) {
    const ranges = [];
    for (const nodes of data.nodes) {
      const row = exact.map(({ mode, points }) => ({ mode, step: points.find((point) => point.nodes === nodes)?.step })).filter((each) => each.step);
      if (!row.length) continue;
      const best = row.reduce((a, b) => b.step.seconds < a.step.seconds ? b : a), last = ranges[ranges.length - 1];
      const before = last && row.find(({ mode }) => mode.name === last.name);
      if (before && before.step.seconds <= EQUAL * best.step.seconds) last.to = nodes;
      else ranges.push({ name: best.mode.name, from: nodes, to: nodes });
    }
    const end = ranges.length ? ranges[ranges.length - 1].to : 0;
    if (ranges.length === 1) return [`${ranges[0].name} is the fastest exact mode for every number of nodes.`];
    const range = ({ name, from, to }) => to === end ? `${name} from ${from} nodes on` : from === to ? `${name} at ${from}` : `${name} from ${from} to ${to} nodes`;
    return ranges.length > 6 ? [] : [`Of the exact modes the fastest is ${ranges.map(range).join(", then ")}.`];
  }

  $("samples").value = data.samples ?? "";
  reset();
  $("controls").addEventListener("input", refresh);
  $("metric").addEventListener("change", refresh);
  for (const id of ["samples", "cost"]) $(id).addEventListener("input", refresh);
  $("reset").addEventListener("click", () => { reset(); refresh(); });
  addEventListener("resize", () => draw(current));
  refresh();
})();
