// The model of a step, as in collectives.py, step.py and scale.py; tests/browser/test_what_if_page.py compares them at
// random points. A mode is a row of page.py: rounds by number of nodes, segments, buckets, schedule. Seconds and bytes.
"use strict";
function makeModel(data) {
  const {
    segment_bytes: SEGMENT_BYTES, goodput: GOODPUT, loss_factor: LOSS_FACTOR, element: ELEMENT, epsilon: EPSILON,
    ddp_buckets: DDP_BUCKETS, last_buckets: LAST_BUCKETS, open: OPEN, periods: PERIODS, max_slowed: MAX_SLOWED,
    band: BAND,
  } = data.constants;
  const sum = (values) => values.reduce((a, b) => a + b, 0);
  for (const mode of data.modes) mode.rounds = mode.key === null ? null : data.rounds[mode.key] || {};

  // --- one synchronisation ---

  function payload(wire) {
    const turn = 2 * wire.latency, limits = [wire.rate];
    if (turn > 0) {
      if (wire.window !== null) limits.push(wire.window / turn);
      if (wire.loss > 0) limits.push(LOSS_FACTOR * SEGMENT_BYTES / turn / Math.sqrt(wire.loss));
    }
    return Math.min(...limits);
  }

  function chain(count, own, window, latency) {
    if (window * own >= own + latency) return count * own + latency;
    const turns = Math.floor((count - 1) / window), rest = (count - 1) % window;
    return turns * (own + latency) + (rest + 1) * own + latency;
  }

  function partsOf(segments, message) {
    const needed = Math.max(segments.fewest, Math.ceil(message / segments.size));
    return segments.most === null ? needed : Math.min(segments.most, needed);
  }

  // loads: [link share, share the other way, uplink share, messages, count] of each kind of round
  function duration(loads, segments, size, wire, inPipeline = false) {
    let seconds = 0, busy = 0;
    const rate = payload(wire);
    for (const [linkShare, back, uplinkShare, messages, count] of loads) {
      const link = (linkShare + wire.acks * back) * size / rate;
      const answered = linkShare ? 1 + wire.acks * back / linkShare : 1;
      const uplink = wire.uplink ? uplinkShare * answered * size / wire.uplink : 0;
      let parts = 1, window = 1;
      if (segments && messages === 1) {
        parts = partsOf(segments, linkShare * size);
        window = Math.min(parts, segments.in_flight || parts);
      }
      let own = Math.max(link, uplink) / parts;
      own = inPipeline ? Math.max(own, wire.segment) : own + wire.message * messages;
      const latency = wire.latency + wire.wakeup + (uplinkShare ? wire.uplink_latency : 0);
      seconds += chain(count * parts, own, window, latency);
      busy += count * parts * own;
    }
    return { seconds, wire: busy, use: seconds > 0 ? busy / seconds : 1 };
  }

  // --- buckets ---

  function pipelineBucket(mode, size, ranks, rate) {
    if (mode.bucket !== null) return mode.bucket;
    const best = Math.sqrt(OPEN.segment * size * ranks * rate / GOODPUT);
    const most = Math.max(OPEN.least, Math.min(OPEN.most, size / OPEN.buckets));
    return 2 ** roundHalfEven(Math.log2(Math.min(Math.max(best, OPEN.least), most)));
  }

  function roundHalfEven(value) {
    const low = Math.floor(value), part = value - low;
    return part === 0.5 ? (low % 2 ? low + 1 : low) : Math.round(value);
  }

  function bucketBounds(total, most) {
    const sizes = [];
    let rest = total;
    for (const divisor of LAST_BUCKETS) {
      sizes.push(Math.min(rest, Math.max(1, Math.floor(most / divisor))));
      rest -= sizes[sizes.length - 1];
    }
    while (rest) {
      sizes.push(Math.min(rest, most));
      rest -= sizes[sizes.length - 1];
    }
    const bounds = [0];
    for (const size of sizes.reverse()) if (size) bounds.push(bounds[bounds.length - 1] + size);
    return bounds;
  }

  function grouped(mode, sizes) {
    if (mode.reference) {
      const limits = mode.bucket ? [mode.bucket, mode.bucket] : DDP_BUCKETS, groups = [[]];
      let filled = 0;
      sizes.forEach((size, k) => {
        groups[groups.length - 1].push(k);
        filled += size;
        if (filled >= limits[groups.length > 1 ? 1 : 0]) { groups.push([]); filled = 0; }
      });
      return groups.filter((group) => group.length);
    }
    if (mode.granularity === "param") return sizes.map((_, k) => [k]);
    if (mode.granularity !== "bucket") return sizes.length ? [sizes.map((_, k) => k)] : [];
    const groups = [];
    let room = 0;
    sizes.forEach((size, k) => {
      if (!groups.length || size > room) { groups.push([]); room = mode.bucket; }
      groups[groups.length - 1].push(k);
      room -= size;
    });
    return groups;
  }

  function bucketsOf(mode, work, ranks, wire) {
    const sizes = work.tensors.map(([size]) => size);
    if (mode.schedule !== "pipeline")
      return grouped(mode, sizes).map((group) => {
        const layers = group.map((k) => work.tensors[k][1]);
        return { size: sum(group.map((k) => sizes[k])), first: Math.min(...layers), last: Math.max(...layers) };
      });
    const limit = pipelineBucket(mode, work.size, ranks, Math.min(wire.rate, wire.uplink || Infinity));
    const bounds = bucketBounds(Math.floor(work.size / ELEMENT), Math.max(1, Math.floor(limit / ELEMENT)));
    const found = [];
    for (let k = 1; k < bounds.length; k++) {
      const a = bounds[k - 1] * ELEMENT, b = bounds[k] * ELEMENT;
      let end = 0, first = Infinity, last = -Infinity;
      for (const [size, layer] of work.tensors) {
        end += size;
        if (a < end && end - size < b) { first = Math.min(first, layer); last = Math.max(last, layer); }
      }
      found.push({ size: b - a, first, last });
    }
    return found;
  }

  // --- one step ---

  function medianOfLargest(values, draws) {
    const count = values.length, beyond = -Math.expm1(Math.log(0.5) / draws), place = (1 - beyond) * count - 0.5;
    if (place <= 0) return values[0];
    if (place < count - 1) {
      const whole = Math.floor(place);
      return values[whole] + (place - whole) * (values[whole + 1] - values[whole]);
    }
    const upper = values.slice(-Math.max(2, Math.floor(count / 10)));
    const excess = sum(upper) / upper.length - upper[0];
    return values[count - 1] + excess * Math.log(0.5 / count / beyond);
  }

  const slowest = (node, ranks, steps) => 1 + (medianOfLargest(node.jitter, ranks) - 1) / Math.sqrt(steps);

  function slowed(node, wire) {
    if (node.sleeps) return 0;
    const wanted = Math.min(node.threads, node.cpus);
    const left = node.cpus - node.byte_cpu / node.speed * payload(wire);
    return Math.min(MAX_SLOWED, Math.max(0, 1 - left / wanted));
  }

  const computeOf = (work) => work.before + sum(work.forward) + work.after + sum(work.backward) + work.update;

  function bytesOfLayers(work) {
    const bytes = new Array(work.forward.length).fill(0);
    for (const [size, layer] of work.tensors) bytes[layer] += size;
    return bytes;
  }

  // The wire with a rate that the node's processor can carry.
  function carried(node, wire) {
    if (node.sleeps || node.byte_cpu <= 0) return wire;
    return { ...wire, rate: Math.min(wire.rate, node.cpus * node.speed / node.byte_cpu) };
  }

  function predict(work, node, given, mode, ranks) {
    const wire = carried(node, given), rounds = mode.rounds && mode.rounds[ranks];
    if (!rounds) {
      const alone = computeOf(work) / node.speed;
      return { seconds: alone, compute: alone, busy: 0 };
    }
    const slow = slowest(node, ranks, mode.every) / node.speed, real = node.sleeps ? node.speed : 1;
    const copies = node.copy * work.size * real;
    const forward = (work.before + sum(work.forward) + work.after) * slow;
    const backward = (sum(work.backward) + copies) * slow, update = work.update * slow;
    const coded = node.code * work.size / node.speed * real;
    const buckets = bucketsOf(mode, work, ranks, given);
    if (mode.schedule === "pipeline") return pipelined(work, node, wire, mode, ranks, buckets, slow, copies, rounds);
    const timed = buckets.map((bucket) => duration(rounds.all, mode.segments, bucket.size * mode.share, wire));
    const compute = forward + backward + update + coded;
    const credit = Math.min(wire.credit, sum(timed.map((each) => each.wire)));
    if (mode.schedule === "after" && !mode.reference) {
      const sent = (sum(timed.map((each) => each.seconds)) - credit) / mode.every;
      return { seconds: compute + sent, compute, busy: sent };
    }
    const ready = readyOf(work, buckets, slow, copies).map((each) => Math.min(each, backward));
    const [ended, busy] = overlapped(backward, ready, timed, mode.in_flight, slowed(node, wire), credit);
    return { seconds: forward + ended + update + coded, compute, busy };
  }

  function readyOf(work, buckets, slow, copies) {
    const bytes = bytesOfLayers(work), ends = [], found = [];
    let done = 0;
    for (let layer = work.backward.length - 1; layer >= 0; layer--) {
      done += (work.backward[layer] + copies * bytes[layer] / work.size) * slow;
      ends[layer] = done;
    }
    for (const bucket of buckets) found.push(Math.max(ends[bucket.first], found.length ? found[found.length - 1] : 0));
    return found;
  }

  function overlapped(compute, ready, timed, inFlight, slow, credit) {
    let now = 0, at = 0, busy = 0, following = 0, active = [];
    while (at < compute - EPSILON || following < timed.length || active.length) {
      while (following < timed.length && active.length < inFlight && ready[following] <= at + EPSILON) {
        const own = timed[following];
        active.push([Math.max(0, own.seconds - (following === 0 ? credit : 0)), own.use]);
        following++;
      }
      const wanted = sum(active.map(([, use]) => use)), rate = wanted > 0 ? Math.min(1, 1 / wanted) : 1;
      const pace = 1 - slow * Math.min(1, wanted);
      let passed = Math.min(Infinity, ...active.map(([left]) => left / rate));
      if (at < compute - EPSILON) {
        const waits = following < timed.length && active.length < inFlight && ready[following] > at;
        passed = Math.min(passed, ((waits ? Math.min(compute, ready[following]) : compute) - at) / pace);
      }
      now += passed;
      if (active.length) busy += passed;
      if (at < compute) at = Math.min(compute, at + passed * pace);
      for (const each of active) each[0] -= passed * rate;
      active = active.filter(([left]) => left > EPSILON);
    }
    return [now, busy];
  }

  function pipelined(work, node, wire, mode, ranks, buckets, slow, copies, rounds) {
    const reduce = buckets.map((bucket) => duration(rounds.reduce, null, bucket.size, wire, true));
    const gather = buckets.map((bucket) => {
      const own = duration(rounds.gather, null, bucket.size, wire, true);
      const seconds = own.seconds + work.update * slow * bucket.size / work.size / ranks;
      return { seconds, wire: own.wire, use: seconds > 0 ? own.wire / seconds : 1 };
    });
    const layers = work.forward.length, needs = [], launches = [], bytes = bytesOfLayers(work);
    for (let layer = 0; layer < layers; layer++) { needs.push([]); launches.push([]); }
    buckets.forEach((bucket, number) => {
      launches[bucket.first].push(number);
      for (let layer = bucket.first; layer <= bucket.last; layer++) needs[layer].push(number);
    });
    const loss = slowed(node, wire), open = new Set();
    let now = 0, busy = 0, jobs = [];  // jobs: the most urgent first
    const begin = (number, kind, own) => {
      const job = { number, kind, left: own.seconds, use: own.use };
      const after = (other) => other.number < number || (other.number === number && other.kind > kind);
      let place = jobs.length;
      while (place && after(jobs[place - 1])) place--;
      jobs.splice(place, 0, job);
    };
    const ratesOf = () => {
      let free = 1;
      const rates = [];
      for (const job of jobs) {
        if (free <= EPSILON) break;
        const rate = job.use > 0 ? Math.min(1, free / job.use) : 1;
        rates.push(rate);
        free -= rate * job.use;
      }
      return [rates, Math.max(0, free)];
    };
    const next = (rates) => rates.reduce((least, rate, k) => Math.min(least, jobs[k].left / rate), Infinity);
    const pass = (seconds, rates) => {
      now += seconds;
      if (jobs.length) busy += seconds;
      const ended = [];
      rates.forEach((rate, k) => {
        jobs[k].left -= seconds * rate;
        if (jobs[k].left <= EPSILON) ended.push(jobs[k]);
      });
      for (const job of ended) {
        jobs.splice(jobs.indexOf(job), 1);
        if (job.kind === 0) begin(job.number, 1, gather[job.number]);
        else open.delete(job.number);
      }
    };
    const compute = (seconds) => {
      while (seconds > EPSILON) {
        const [rates, free] = ratesOf(), pace = 1 - loss * (1 - free), passed = Math.min(seconds / pace, next(rates));
        seconds -= passed * pace;
        pass(passed, rates);
      }
    };
    const wait = (numbers) => {
      while (numbers.some((number) => open.has(number))) {
        const [rates] = ratesOf();
        pass(next(rates), rates);
      }
    };
    let began = 0, before = 0;
    for (let period = 0; period < PERIODS; period++) {
      [began, before] = [now, busy];
      compute(work.before * slow);
      for (let layer = 0; layer < layers; layer++) {
        wait(needs[layer]);
        compute(work.forward[layer] * slow);
      }
      compute(work.after * slow);
      for (let layer = layers - 1; layer >= 0; layer--) {
        compute((work.backward[layer] + copies * bytes[layer] / work.size) * slow);
        for (const number of launches[layer]) { open.add(number); begin(number, 0, reduce[number]); }
      }
    }
    const own = (work.before + sum(work.forward) + work.after + sum(work.backward) + copies) * slow;
    return { seconds: now - began, compute: own, busy: busy - before };
  }

  // --- what the page changes: links with another rate and delay (uplinks stay), a gradient of another size ---

  function wireAt(own, rate, delay) {
    const made = { ...own };
    if (rate !== null) made.rate = rate / 8 * data.efficiency * (own.rate / data.wire.rate);
    if (delay !== null) made.latency = Math.max(0, own.latency - data.base.delay) + delay;
    return made;
  }

  function resized(work, factor) {
    if (factor === 1) return work;
    const size = (each) => Math.max(ELEMENT, Math.floor(each * factor / ELEMENT + 0.5) * ELEMENT);
    const tensors = work.tensors.map(([each, layer]) => [size(each), layer]);
    return { ...work, tensors, size: sum(tensors.map(([each]) => each)) };
  }

  // The work with the compute of a draw: its times, and when in backward gradients are made.
  function drawn(work, draw) {
    const factor = draw.compute, power = draw.ready, whole = sum(work.backward) || 1;
    if (factor === 1 && power === 1) return work;
    const backward = [];
    let done = 0;
    for (let layer = work.backward.length - 1; layer >= 0; layer--) {
      const before = done;
      done += work.backward[layer];
      backward[layer] = whole * factor * ((done / whole) ** power - (before / whole) ** power);
    }
    const times = (seconds) => seconds * factor;
    return {
      ...work, backward, forward: work.forward.map(times),
      before: times(work.before), after: times(work.after), update: times(work.update),
    };
  }

  const takesBucket = (mode) => mode.granularity === "bucket" || mode.reference;
  const withBucket = (mode, bucket) => bucket !== null && takesBucket(mode) ? { ...mode, bucket } : mode;
  const LIKELY = { compute: 1, ready: 1, node: data.node, wire: data.wire, copies: data.copies, codes: data.codes };

  // The step of one mode with the parameters of a draw, or the most likely ones; null where the mode cannot exist.
  // place: work, rate, delay and bucket (null: as in the runs), and speed
  function at(mode, nodes, place, draw = LIKELY) {
    if (mode.rounds && nodes > 1 && !mode.rounds[nodes]) return null;
    const code = mode.codec === null ? 0 : draw.codes[mode.codec];
    const node = { ...draw.node, speed: place.speed, copy: draw.copies[mode.family], code };
    const wire = wireAt(draw.wire, place.rate, place.delay);
    return predict(drawn(place.work, draw), node, wire, withBucket(mode, place.bucket), nodes);
  }

  function quantile(sorted, share) {
    const place = share * (sorted.length - 1), whole = Math.floor(place);
    return sorted[whole] + (place - whole) * ((sorted[whole + 1] ?? sorted[whole]) - sorted[whole]);
  }

  function bandOf(mode, nodes, place, seconds) {
    const steps = data.draws.map((draw) => at(mode, nodes, place, draw).seconds).sort((a, b) => a - b);
    const [low, high] = BAND.map((share) => quantile(steps, share)), off = mode.misfit * seconds;
    const below = Math.hypot(seconds - Math.min(low, seconds), off);
    return [seconds - below, seconds + Math.hypot(Math.max(high, seconds) - seconds, off)];
  }

  // --- where something changes ---

  // The value between `low` and `high`, on a logarithmic scale, at which `holds` changes; both ends must differ.
  function bisect(holds, low, high) {
    const first = holds(low);
    for (let turn = 0; turn < 20; turn++) {
      const middle = Math.sqrt(low * high);
      if (holds(middle) === first) low = middle;
      else high = middle;
    }
    return Math.sqrt(low * high);
  }

  // Where between two numbers of nodes a value that is known at both passes 0.
  function between(low, high, atLow, atHigh) {
    return atLow === atHigh ? low : low * (high / low) ** (atLow / (atLow - atHigh));
  }

  return { at, bandOf, predict, resized, computeOf, takesBucket, bisect, between };
}
const model = makeModel(data);
