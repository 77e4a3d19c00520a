// The page: reads the sliders, computes every curve with model.js, draws them and says in words where they cross.
(() => {
  "use strict";
  const $ = (id) => document.getElementById(id), SVG = "http://www.w3.org/2000/svg";
  const DASHES = ["", "7 4", "2 3", "9 3 2 3", "4 2 1 2"], BUCKETS = [null, 18, 19, 20, 21, 22, 23, 24, 25, 26];
  const GOOD = 0.9; // an efficiency that is worth a sentence
  const EQUAL = 1.03; // a mode is still the fastest if it is that near: predictions are not more precise
  const RATES = [1e7, 1e11], FIRST_DELAY = 0.0001, LONGEST_DELAY = 1; // of the sliders: bit/s, seconds
  const SCAN = 24; // values of an axis at which the fastest mode is looked for
  const REST_MS = 120; // what takes longer is computed when the sliders rest
  const hidden = new Set(), used = {};
  for (const mode of data.modes)
    mode.dash = DASHES[(used[mode.colour] = (used[mode.colour] ?? -1) + 1) % DASHES.length];
  const baseRate = data.base.rate || data.wire.rate * 8 / data.efficiency;
  const measuredTo = Math.max(data.base.nodes, ...data.measured.map((each) => each.nodes));

  // --- numbers in words ---

  const three = (value) => value >= 1000 ? value.toFixed(0) : String(+value.toPrecision(3));
  const two = (value) => String(+value.toPrecision(2));
  const rateText = (bit, digits = three) => bit >= 1e9 ? `${digits(bit / 1e9)} Gbit/s` : `${digits(bit / 1e6)} Mbit/s`;
  const sizeText = (bytes) => bytes >= 1e9 ? `${three(bytes / 1e9)} GB` : `${three(bytes / 1e6)} MB`;
  const bucketText = (bytes) => bytes >= 2 ** 20 ? `${bytes / 2 ** 20} MiB` : `${bytes / 1024} KiB`;
  const secondsText = (s, digits = three) => s >= 1 ? `${digits(s)} s` : `${digits(1000 * s)} ms`;
  const percent = (share) => `${(100 * share).toFixed(share < 0.1 ? 1 : 0)} %`;
  const nodesText = (count) => `${count} node${count > 1 ? "s" : ""}`;
  function durationText(seconds) {
    if (seconds < 90) return `${three(seconds)} s`;
    return seconds < 5400 ? `${three(seconds / 60)} min` : `${three(seconds / 3600)} h`;
  }

  // --- what the sliders say ---

  const delayPlace = (seconds) => seconds < FIRST_DELAY ? 0 : Math.round(25 * Math.log10(seconds / FIRST_DELAY));
  const near = (a, b) => Math.abs(a - b) <= 0.03 * Math.max(a, b, 1e-9);

  function settings() {
    const speed = 10 ** +$("speed").value, size = 10 ** +$("size").value, rate = 10 ** +$("rate").value;
    const delay = +$("delay").value === 0 ? 0 : FIRST_DELAY * 10 ** (+$("delay").value / 25);
    const power = BUCKETS[+$("bucket").value];
    const set = {
      nodes: data.nodes[+$("nodes").value],
      rate: near(rate, baseRate) ? null : rate,
      delay: delay === 0 && !data.base.delay ? null : delay,
      speed: near(speed, 1) ? 1 : speed,
      size: near(size, 1) ? 1 : size,
      bucket: power === null ? null : 2 ** power,
    };
    set.work = model.resized(data.work, set.size);
    set.alone = model.computeOf(set.work) / set.speed;
    return set;
  }

  function reset() {
    $("nodes").max = data.nodes.length - 1;
    $("nodes").value = Math.max(0, data.nodes.findIndex((n) => n >= Math.max(16, data.base.nodes)));
    [$("rate").min, $("rate").max] = RATES.map(Math.log10);
    $("rate").step = "any";
    $("rate").value = Math.log10(baseRate);
    $("delay").value = delayPlace(data.base.delay);
    for (const id of ["speed", "size", "bucket"]) $(id).value = 0;
  }

  function showSettings(set) {
    const measured = data.base.delay ? secondsText(data.base.delay) : "as measured";
    $("nodes-text").value = set.nodes;
    $("rate-text").value = rateText(set.rate ?? baseRate);
    $("delay-text").value = set.delay === null ? measured : set.delay ? secondsText(set.delay) : "none";
    $("speed-text").value = set.speed === 1 ? "as measured" : `${three(set.speed)} x`;
    $("size-text").value = sizeText(set.work.size);
    $("bucket-text").value = set.bucket === null ? "as named" : bucketText(set.bucket);
  }

  const METRICS = {
    seconds: { title: "Seconds a step", of: (step) => step.seconds, logarithmic: true },
    speedup: {
      title: "Speed-up over one node", logarithmic: true, shows: [1],
      of: (step, nodes, alone) => nodes * alone / step.seconds,
    },
    efficiency: {
      title: "Efficiency: speed-up over nodes", of: (step, nodes, alone) => alone / step.seconds, share: true,
    },
    exposed: {
      title: "Share of a step that waits for communication", share: true, unbanded: true,
      of: (step) => Math.max(0, step.seconds - step.compute) / step.seconds,
    },
  };
  const efficiency = (step, set) => set.alone / step.seconds;

  // --- curves ---

  let curves = [], bands = [], timer = 0, current = null;

  function curveOf(mode, set) {
    const several = data.nodes.filter((n) => n > 1);
    return several.map((nodes) => ({ nodes, step: model.at(mode, nodes, set) })).filter((point) => point.step);
  }

  function refresh() {
    const set = current = settings();
    curves = data.modes.map((mode) => curveOf(mode, set));
    bands = [];
    showSettings(set);
    draw(set);
    table(set);
    clearTimeout(timer);
    timer = setTimeout(() => { table(set, true); words(set); computeBands(set); }, REST_MS);
  }

  // Bands take sixteen times as long as curves: one mode at a time.
  function computeBands(set, k = 0) {
    const withBand = ({ nodes, step }) =>
      ({ nodes, step, band: model.bandOf(data.modes[k], nodes, set, step.seconds) });
    bands[k] = curves[k].map(withBand);
    draw(set);
    if (k + 1 < curves.length) timer = setTimeout(() => computeBands(set, k + 1));
  }

  // --- the chart ---

  function element(name, attributes, parent, text) {
    const made = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text !== undefined) made.textContent = text;
    if (parent) parent.append(made);
    return made;
  }
  const colourOf = (mode) => `var(--${mode.colour})`;

  function ticks(low, high, logarithmic) {
    const found = [];
    if (!logarithmic) {
      const raw = (high - low) / 5, power = 10 ** Math.floor(Math.log10(raw));
      const unit = [1, 2, 5, 10].find((u) => u * power >= raw) * power;
      for (let value = Math.ceil(low / unit) * unit; value <= high * 1.0001; value += unit) found.push(value);
      return found;
    }
    const leads = Math.log10(high / low) > 3 ? [1] : [1, 2, 5];
    for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++)
      for (const value of leads.map((lead) => lead * 10 ** power))
        if (value >= low * 0.999 && value <= high * 1.001) found.push(value);
    return found;
  }

  // Where numbers of nodes and values of the metric are in the picture.
  function frameOf(metric, values) {
    const wide = Math.max(300, $("plot").clientWidth), high = wide < 520 ? 300 : 400, named = wide >= 620;
    const left = 52, right = wide - (named ? 176 : 12), top = 10, foot = high - 40;
    const from = 2, to = data.nodes[data.nodes.length - 1], span = Math.log(to / from);
    const largest = Math.max(...values), logarithmic = Boolean(metric.logarithmic);
    const low = logarithmic ? Math.min(...values) * 0.85 : 0;
    const most = logarithmic ? largest * 1.15 : Math.min(1.02, largest * 1.08) || 1;
    const logShare = (v) => Math.log(Math.max(v, low) / low) / Math.log(most / low);
    const share = (v) => logarithmic ? logShare(v) : (v - low) / (most - low);
    return {
      wide, high, named, left, right, top, foot, from, to, low, most, logarithmic,
      x: (nodes) => left + (right - left) * Math.log(nodes / from) / span,
      y: (value) => foot - (foot - top) * Math.min(1, share(value)),
      nodesAt: (x) => from * Math.exp((x - left) / (right - left) * span),
    };
  }

  function draw(set) {
    const metric = METRICS[$("metric").value];
    const shown = curves.map((points, k) => hidden.has(k) ? [] : points.map(({ nodes, step }) =>
      [nodes, metric.of(step, nodes, set.alone)]));
    const values = [...shown.flat().map(([, value]) => value), ...(metric.shows || [])];
    const frame = frameOf(metric, values.length ? values : [1]);
    const svg = element("svg", { viewBox: `0 0 ${frame.wide} ${frame.high}`, role: "img", "aria-label": metric.title });
    drawFrame(svg, metric, frame);
    if (!metric.unbanded) drawBands(svg, set, metric, frame);
    shown.forEach((points, k) => drawCurve(svg, data.modes[k], k, points, frame));
    if (!metric.unbanded) drawMeasured(svg, set, metric, frame);
    if (frame.named) nameCurves(svg, shown, frame);
    const here = frame.x(Math.max(frame.from, set.nodes));
    element("line", { class: "here", x1: here, x2: here, y1: frame.top, y2: frame.foot }, svg);
    svg.addEventListener("pointerdown", (event) => chooseNodes(svg, event, frame));
    $("plot").replaceChildren(svg);
    $("chart-title").textContent = metric.title;
    const fitting = data.measured.filter((each) => fits(each, set)).length;
    const all = data.measured.filter((each) => each.nodes > 1).length;
    $("reading").textContent = `Circles: ${fitting} of ${all} measured points are for these settings. `
      + "Pale areas: 90 % bands. Click the chart to choose the nodes, a row below to hide its curve.";
  }

  function drawFrame(svg, metric, { wide, left, right, top, foot, high, from, to, low, most, logarithmic, x, y }) {
    const beyond = Math.max(measuredTo, from), room = x(to) - x(beyond);
    element("rect", { class: "beyond", x: x(beyond), y: top, width: Math.max(0, room), height: foot - top }, svg);
    for (const value of ticks(low, most, logarithmic)) {
      element("line", { class: "grid", x1: left, x2: right, y1: y(value), y2: y(value) }, svg);
      const text = metric.share ? `${Math.round(100 * value)} %` : three(value);
      element("text", { x: left - 7, y: y(value) + 4, "text-anchor": "end" }, svg, text);
    }
    for (let n = from; n <= to; n *= wide < 420 ? 4 : 2)
      element("text", { x: x(n), y: foot + 17, "text-anchor": "middle" }, svg, n);
    element("line", { class: "axis", x1: left, x2: right, y1: foot, y2: foot }, svg);
    element("text", { x: (left + right) / 2, y: high - 5, "text-anchor": "middle" }, svg, "nodes");
    const told = room > 240 ? `measured up to ${measuredTo}, extrapolated beyond` : "extrapolated";
    if (room > 90) element("text", { x: x(beyond) + 6, y: top + 13 }, svg, told);
  }

  const pathOf = (points, { x, y }) => points.map(([nodes, value]) => `${x(nodes).toFixed(1)} ${y(value).toFixed(1)}`);

  function drawCurve(svg, mode, k, points, frame) {
    if (!points.length) return;
    const d = `M${pathOf(points, frame).join("L")}`;
    element("path", { class: "line", d, stroke: colourOf(mode), "stroke-dasharray": mode.dash, "data-mode": k }, svg);
  }

  function drawBands(svg, set, metric, frame) {
    bands.forEach((points, k) => {
      if (hidden.has(k) || !points.length) return;
      const edge = (side) => pathOf(points.map(({ nodes, band, step }) =>
        [nodes, metric.of({ ...step, seconds: Math.max(1e-9, band[side]) }, nodes, set.alone)]), frame);
      const d = `M${[...edge(1), ...edge(0).reverse()].join("L")}Z`;
      element("path", { class: "band", d, fill: colourOf(data.modes[k]) }, svg);
    });
  }

  function fits(each, set) {
    const rate = each.rate === null ? !data.base.rate && set.rate === null : near(each.rate, set.rate ?? baseRate);
    const asMeasured = set.speed === 1 && set.size === 1 && near(each.delay, set.delay ?? data.base.delay);
    const mode = data.modes.find((own) => own.name === each.mode);
    return each.nodes > 1 && rate && asMeasured && Boolean(mode) && (set.bucket === null || !model.takesBucket(mode));
  }

  function drawMeasured(svg, set, metric, { x, y }) {
    for (const each of data.measured.filter((found) => fits(found, set))) {
      const k = data.modes.findIndex((mode) => mode.name === each.mode), stroke = colourOf(data.modes[k]);
      if (hidden.has(k)) continue;
      const cx = x(each.nodes), place = (seconds) => y(metric.of({ seconds, compute: 0 }, each.nodes, set.alone));
      element("line", { x1: cx, x2: cx, y1: place(each.low), y2: place(each.high), stroke, "stroke-width": 2 }, svg);
      const look = { r: 4.5, fill: "var(--card)", stroke, "stroke-width": 2.4 };
      const dot = element("circle", { cx, cy: place(each.seconds), ...look }, svg);
      const how = each.emulated ? "with emulated compute" : "measured";
      element("title", {}, dot, `${each.mode}, ${each.nodes} nodes: ${secondsText(each.seconds)} ${how}`);
    }
  }

  // Names at the right end of the curves, moved apart where they would overlap.
  function nameCurves(svg, shown, { x, y, top, foot }) {
    const ends = shown.map((points, k) => ({ k, last: points[points.length - 1] })).filter((each) => each.last)
      .map((each) => ({ ...each, place: y(each.last[1]) })).sort((a, b) => a.place - b.place);
    ends.forEach((each, n) => { if (n) each.place = Math.max(each.place, ends[n - 1].place + 14); });
    for (let n = ends.length - 1, limit = foot; n >= 0; n--) {
      ends[n].place = Math.max(top + 4, Math.min(ends[n].place, limit));
      limit = ends[n].place - 14;
    }
    for (const { k, last, place } of ends) {
      const text = element("text", { class: "name", x: x(last[0]) + 8, y: place + 4 }, svg, short(data.modes[k].name));
      text.style.fill = colourOf(data.modes[k]);
    }
  }
  const short = (name) => name.length > 24 ? `${name.slice(0, 23)}…` : name;

  function chooseNodes(svg, event, { wide, nodesAt }) {
    const box = svg.getBoundingClientRect(), wanted = nodesAt((event.clientX - box.left) * wide / box.width);
    const distance = (k) => Math.abs(Math.log(data.nodes[k] / wanted));
    $("nodes").value = data.nodes.reduce((best, _, k) => distance(k) < distance(best) ? k : best, 0);
    refresh();
  }

  // --- the table ---

  function table(set, withBands = false) {
    const several = set.nodes > 1;
    const rows = data.modes.map((mode, k) => ({ mode, k, step: model.at(mode, set.nodes, set) }))
      .filter((row) => row.step && (several || !row.mode.rounds || row.k === 0))
      .sort((a, b) => a.step.seconds - b.step.seconds);
    const sending = rows.filter((row) => row.mode.rounds);
    const best = sending.find((row) => row.mode.exact) || sending[0] || rows[0];
    $("modes").tBodies[0].replaceChildren(...rows.map((row) => rowOf(row, set, row === best, withBands && several)));
    const network = rateText(set.rate ?? baseRate);
    $("here-title").textContent = `${nodesText(set.nodes)} at ${network}`;
    $("headline").textContent = !several ? `One node takes ${secondsText(set.alone)} a step.`
      : !sending.length ? `No mode of this page that synchronises can be computed for ${nodesText(set.nodes)}.`
        : `${nodesText(set.nodes)} at ${network}: ${best.mode.name} is the fastest ${best.mode.exact ? "exact " : ""}mode`
          + `${best.mode.exact ? "" : " (none is exact)"}, `
          + `${secondsText(best.step.seconds)} a step and ${percent(efficiency(best.step, set))} efficient.`;
  }

  function rowOf({ mode, k, step }, set, isBest, withBand) {
    const line = document.createElement("tr"), head = document.createElement("th");
    const swatch = element("svg", { class: "swatch" });
    const stroke = { stroke: colourOf(mode), "stroke-width": 3, "stroke-dasharray": mode.dash };
    element("line", { x1: 0, x2: 22, y1: 5, y2: 5, ...stroke }, swatch);
    head.scope = "row";
    head.append(swatch, set.nodes > 1 ? mode.name : "one node");
    line.append(head);
    for (const text of cellsOf(mode, step, set, withBand)) line.insertCell().textContent = text;
    line.className = `${isBest ? "best" : ""}${hidden.has(k) ? " off" : ""}`;
    line.addEventListener("click", () => {
      if (!hidden.delete(k)) hidden.add(k);
      draw(set);
      line.classList.toggle("off");
    });
    return line;
  }

  function cellsOf(mode, step, set, withBand) {
    const samples = +$("samples").value || 0, cost = +$("cost").value || 0;
    const epoch = samples ? samples / (data.batch * set.nodes) * step.seconds : null;
    const band = withBand ? model.bandOf(mode, set.nodes, set, step.seconds).map(three).join(" to ") : "…";
    return [
      three(step.seconds), set.nodes > 1 ? band : "-", three(set.nodes * efficiency(step, set)),
      percent(efficiency(step, set)), percent(METRICS.exposed.of(step)), epoch === null ? "-" : durationText(epoch),
      epoch !== null && cost ? three(epoch / 3600 * set.nodes * cost) : "-",
    ];
  }

  // --- crossings in words ---

  function words(set) {
    const sending = data.modes.map((mode, k) => ({ mode, points: curves[k] }))
      .filter(({ mode, points }) => mode.rounds && points.length);
    const exact = sending.filter(({ mode }) => mode.exact);
    const said = [
      ...(exact.length > 1 ? [fastestOverNodes(exact)] : []),
      ...sending.flatMap(({ mode, points }) => overNodes(mode, points, set)),
    ];
    if (set.nodes > 1) {
      if (exact.length > 1)
        said.push(fastestOver(exact, set, "rate", RATES, (bit) => rateText(bit, two)),
          fastestOver(exact, set, "delay", [FIRST_DELAY, LONGEST_DELAY], (s) => `a delay of ${secondsText(s, two)}`));
      said.push(...sending.flatMap(({ mode }) => overNetworks(mode, set)));
    }
    const line = (text) => Object.assign(document.createElement("li"), { textContent: text });
    $("sentences").replaceChildren(...said.filter(Boolean).map(line));
  }

  // The number of nodes at which a value of the points passes 0 for the first time, between the points; null: nowhere.
  function crossing(points, value) {
    const values = points.map(value), k = values.findIndex((each, n) => n && (each > 0) !== (values[n - 1] > 0));
    return k < 0 ? null : model.between(points[k - 1].nodes, points[k].nodes, values[k - 1], values[k]);
  }

  // Where a mode stops gaining, how far it is efficient, and from where on it waits for messages.
  function overNodes(mode, points, set) {
    const said = [], last = points[points.length - 1];
    const gain = points.map(({ nodes, step }) => nodes * efficiency(step, set)), most = gain.indexOf(Math.max(...gain));
    if (most < points.length - 1 && gain[most] > 1.05 * gain[gain.length - 1])
      said.push(`${mode.name} stops gaining at ${points[most].nodes} nodes: `
        + `${three(gain[most])} times the images per second of one node.`);
    else if (gain[most] <= 1) said.push(`${mode.name} is never faster than one node.`);
    const end = crossing(points, ({ step }) => efficiency(step, set) - GOOD);
    if (end !== null && efficiency(points[0].step, set) >= GOOD)
      said.push(`${mode.name} is at least ${percent(GOOD)} efficient up to ${Math.floor(end)} nodes.`);
    else if (end === null && efficiency(last.step, set) >= GOOD)
      said.push(`${mode.name} is at least ${percent(GOOD)} efficient on all ${last.nodes} nodes.`);
    const waits = crossing(points, (point) => latencyShare(mode, point, set) - 0.5);
    if (waits !== null)
      said.push(`From ${Math.ceil(waits)} nodes on ${mode.name} waits mostly for messages, not for their bytes: `
        + "a higher rate would hardly help.");
    return said;
  }

  // The share of the exposed time that is left on an infinitely fast network.
  function latencyShare(mode, { nodes, step }, set) {
    const exposed = step.seconds - step.compute;
    if (exposed < 0.02 * step.seconds) return 0;
    const fast = model.at(mode, nodes, { ...set, rate: 1e15 });
    return (fast.seconds - fast.compute) / exposed;
  }

  // The rate that a mode needs to be efficient with this many nodes, and the delay up to which it is.
  function overNetworks(mode, set) {
    const good = (change) => efficiency(model.at(mode, set.nodes, { ...set, ...change }), set) >= GOOD;
    if (!model.at(mode, set.nodes, set)) return [];
    const parts = [], [slowest, fastest] = RATES;
    if (good({ rate: fastest }) && !good({ rate: slowest }))
      parts.push(`from ${rateText(model.bisect((rate) => good({ rate }), slowest, fastest), two)} on`);
    if (good({ delay: 0 }) && !good({ delay: LONGEST_DELAY }))
      parts.push(`up to a delay of ${secondsText(model.bisect((delay) => good({ delay }), 1e-6, LONGEST_DELAY), two)}`);
    const told = `With ${set.nodes} nodes ${mode.name} is at least ${percent(GOOD)} efficient`;
    return parts.length ? [`${told} ${parts.join(", and ")}.`] : [];
  }

  // Ranges in which one mode is the fastest: names and where the next one takes over.
  function inRanges(places, secondsAt, crossingOf) {
    const ranges = [];
    places.forEach((place, n) => {
      const row = secondsAt(place);
      const best = [...row].reduce((a, b) => b[1] < a[1] ? b : a), last = ranges[ranges.length - 1];
      if (last && row.has(last.mode) && row.get(last.mode) <= EQUAL * best[1]) return;
      ranges.push({ mode: best[0], from: last ? crossingOf(last.mode, best[0], places[n - 1], place) : null });
    });
    return ranges;
  }

  function fastestOverNodes(exact) {
    const all = exact.reduce((a, b) => b.points.length > a.points.length ? b : a).points.map((point) => point.nodes);
    const secondsOf = (points) => new Map(points.map(({ nodes, step }) => [nodes, step.seconds]));
    const at = new Map(exact.map(({ mode, points }) => [mode, secondsOf(points)]));
    const secondsAt = (nodes) => new Map(exact.filter(({ mode }) => at.get(mode).has(nodes))
      .map(({ mode }) => [mode, at.get(mode).get(nodes)]));
    const lead = (before, after, nodes) => Math.log(at.get(before).get(nodes) / at.get(after).get(nodes));
    const ranges = inRanges(all, secondsAt, (before, after, low, high) => {
      if (!at.get(before).has(high) || !at.get(after).has(low)) return high;
      const [atLow, atHigh] = [lead(before, after, low), lead(before, after, high)];
      return atLow > 0 === atHigh > 0 ? high : Math.ceil(model.between(low, high, atLow, atHigh));
    });
    if (ranges.length === 1) return `${ranges[0].mode.name} is the fastest exact mode for every number of nodes.`;
    const range = ({ mode, from }) => from === null ? `${mode.name} on few nodes` : `${mode.name} from ${from} nodes on`;
    return ranges.length > 6 ? "" : `Of the exact modes the fastest is ${ranges.map(range).join(", then ")}.`;
  }

  // The same over another axis of the network, with the nodes that are chosen.
  function fastestOver(exact, set, axis, [low, high], text) {
    const places = Array.from({ length: SCAN }, (_, k) => low * (high / low) ** (k / (SCAN - 1)));
    const modes = exact.map(({ mode }) => mode).filter((mode) => model.at(mode, set.nodes, set));
    const seconds = (mode, value) => model.at(mode, set.nodes, { ...set, [axis]: value }).seconds;
    const ranges = inRanges(places, (value) => new Map(modes.map((mode) => [mode, seconds(mode, value)])),
      (before, after, a, b) => model.bisect((value) => seconds(before, value) <= seconds(after, value), a, b));
    if (ranges.length < 2 || ranges.length > 6) return "";
    const range = ({ mode, from }) => from === null ? mode.name : `${mode.name} from ${text(from)} on`;
    return `With ${set.nodes} nodes the fastest exact mode is ${ranges.map(range).join(", then ")}.`;
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
