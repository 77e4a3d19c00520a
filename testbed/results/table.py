"""The table of several runs: one row per run, a column per key that varies, a caption for all other keys.

`format_results` makes the text of all results: the CLI prints it; without a controller, rank 0 does.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from testbed.results.conclude import Summary
from testbed.results.validity import busy_note
from testbed.spec.errors import one_line
from testbed.spec.link import Link
from testbed.spec.mode import ALGORITHMS, CONTROL
from testbed.spec.run import RunSpec
from testbed.spec.script import command_line
from testbed.spec.units import format_duration, format_rate, in_megabytes

HEADER = (
    "mode",
    "s/iter",
    "quartiles",
    "speed-up",
    "test loss",
    "accuracy",
    "MB sent/step (rank 0, others)",
    "replicas agree",
)
NOTE = "note"  # the last column, if any row has a note
MIN_WIDTH = 3  # characters of a column: some Markdown parsers need three hyphens in the line below the header
BUSY_MARK = " *"
NOT_SEEN = "not seen"
# Keys without a column, because they do not influence the measurement or because the row shows them already.
NO_COLUMN = {"schema", "experiment", "name", "mode", "placement", "probe", "spans", "port"}
NO_COLUMN |= {
    "layers",
    "dilation",
    "deadline",
    "start_deadline",
    "checkpoint",
    "retries",
    "keep_going",
    "script.path",
    "script.output",
}
# Keys in which a run may differ from its single-node baseline.
NOT_IN_BASELINE = NO_COLUMN | {"nodes", "batch", "batch_per_rank", "batchnorm", "data.shares", "evaluate"}


def table(summaries: Sequence[Summary]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return header and rows, in the given order. Only runs with status "ok" have a row."""
    counted = [s for s in summaries if s.status == "ok"]
    varying, places = varying_keys(counted), varying_places(counted)
    rows = [
        _row(
            s,
            single,
            [
                *(_value(s, key) for key in varying),
                *(PLACES[place](s) for place in places),
            ],
        )
        for s, single in zip(counted, baselines(counted), strict=True)
    ]
    header = (HEADER[0], *(short_key(key, varying) for key in varying), *places, *HEADER[1:])
    notes = [row_note([s]) for s in counted]
    if any(notes):
        return (*header, NOTE), [(*row, note or "-") for row, note in zip(rows, notes, strict=True)]
    return header, rows


def _value(s: Summary, key: str) -> str:
    """Return a run's value of a key that varies; the command line for `script.argv`."""
    value = s.spec.world if key == "nodes" else flatten(s.spec).get(key, "-")
    return command_line(value) if key == "script.argv" and isinstance(value, list) else str(value)


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return an aligned table that is also Markdown. A `|` inside a cell is escaped; a cell is one line."""
    header, *rows = [[_one_cell(cell) for cell in row] for row in (header, *rows)]
    widths = [max(MIN_WIDTH, *(len(row[column]) for row in [header, *rows])) for column in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        first, *rest = zip(cells, widths, strict=True)
        return "| " + " | ".join([first[0].ljust(first[1]), *(text.rjust(width) for text, width in rest)]) + " |"

    rule = "| " + " | ".join(["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]) + " |"
    return "\n".join([line(header), rule, *map(line, rows)])


def row_note(repeats: Sequence[Summary]) -> str:
    """Return what limits the comparison of a row, e.g. `12 of 20 steps left out: rate fault`; else empty.

    Time dilation is named here, because it often differs between rows with different numbers of nodes.
    """
    left_out = sum(s.left_out_steps for s in repeats)
    reasons = dict.fromkeys(s.left_out_reason for s in repeats if s.left_out_steps)
    whole = left_out + sum(s.steps for s in repeats)
    faulted = f"{left_out} of {whole} steps left out: {', '.join(reasons)}" if left_out else ""
    slower = sorted({s.spec.dilation or 1.0 for s in repeats} - {1.0})
    dilated = f"measured {' and '.join(f'{each:g}' for each in slower)} times slower" if slower else ""
    return ", ".join(filter(None, (faulted, dilated)))


def _one_cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def format_results(summaries: Sequence[Summary], where: object) -> str:
    """Return the text after a run or a sweep: caption, table, notes, runs that are not in the table, and the folder."""
    counted = [s for s in summaries if s.status == "ok"]
    lines = [f"\n{caption(counted)}\n\n{format_table(*table(counted))}\n"] if counted else []
    notes = dict.fromkeys(note for s in summaries for note in s.notes)  # without repetition
    lines += [f"note: {note}" for note in [*footnotes(summaries), *notes]]
    for s in summaries:
        seconds = f" ({s.seconds_per_step:.3f} s/iter)" if s.status == "invalid" and s.seconds_per_step else ""
        lines += [f"left out: {sentence}{seconds}" for sentence in left_out([s])]
    lines += [f"{s.spec.name}: {s.network}" for s in counted if s.spec.world > 1]
    return "\n".join([*lines, f"all files are in {where}"])


def footnotes(summaries: Sequence[Summary]) -> list[str]:
    """Return explanations of rows: the control run, copies, emulated compute, dilation, and other load."""
    counted = [s for s in summaries if s.status == "ok"]
    notes = []
    if any(s.spec.mode.is_control for s in counted):
        notes.append(f"{CONTROL}: {ALGORITHMS[CONTROL].does}")
    for copies in sorted({s.copies for s in counted} - {0}):
        done = f"{copies + 1} copies of the job ran at once, each with 1/{copies + 1} of the machine"
        notes.append(f"single: {done}, because there is no CPU quota here; the figures are of the first copy")
    if any(s.spec.emulated for s in counted):
        notes.append("emulated compute: recorded times are replayed, real bytes are sent, and no model is trained")
    if any((s.spec.dilation or 1.0) != 1.0 for s in counted):
        notes.append("measured K times slower: network and compute ran K times slower, all figures are divided by K")
    if busy := busy_footnote(counted):
        notes.append(busy)
    return notes


def busy_footnote(summaries: Sequence[Summary]) -> str:
    """Return the meaning of `busy_mark` with the highest load of these runs; empty if no run has the mark."""
    note = busy_note([s.machines for s in summaries])
    return f"{BUSY_MARK.strip()}: {note}" if note else ""


def busy_mark(summaries: Sequence[Summary]) -> str:
    """Return the mark of a time that was measured beside heavy load of other processes; else an empty text."""
    return BUSY_MARK if any(machine.is_busy for s in summaries for machine in s.machines) else ""


def left_out(summaries: Sequence[Summary]) -> list[str]:
    """Return one sentence for each run that is not in the table."""
    return [f"{s.spec.name}: {s.status}, {s.reason}" for s in summaries if s.status != "ok"]


def caption(summaries: Sequence[Summary]) -> str:
    """Return what all rows have in common. Keys that vary are left out, because they have a column."""
    if not summaries:
        return ""
    spec, varying = summaries[0].spec, set(varying_keys(summaries))
    equal = "" if "overrides" in varying else "unequal " if spec.overrides else "equal "
    alone = all(x.spec.world == 1 for x in summaries)  # `single` only: the other nodes and the network are not used
    each, over_all = ("", "") if alone else (" each", " over all ranks")
    parts = {
        **next((_trained(s.spec, over_all) for s in summaries if s.spec.script is None), {}),
        **_script_in_words([s for s in summaries if s.spec.script is not None]),
        "nodes": "1 node" if alone else f"{spec.nodes} {equal}nodes",
        "node.cpus": f"{spec.node.cpus:g} cores{each}" if spec.node.cpus else "no CPU limit",
        "threads": _threads_in_words(summaries[0], each),
        **({} if alone else _link_in_words(spec.link)),
    }
    common = ", ".join(text for key, text in parts.items() if key not in varying)
    least, most = min(s.steps for s in summaries), max(s.steps for s in summaries)
    steps = f"{least} to {most}" if least < most else f"{most}"
    warmup = "warm-up" if len({s.spec.warmup for s in summaries}) > 1 else f"{spec.warmup} left out"
    middle = "median" if all(x.spec.mode.every == 1 for x in summaries) else "median (every:K: mean)"
    substrates = " and ".join(dict.fromkeys(s.substrate for s in summaries))
    return f"{common}, on {substrates}; {middle} of {steps} steps after {warmup}"


def _link_in_words(link: Link) -> dict[str, str]:
    """Return the link of a node in words, by key."""
    nothing = "no rate limit" if link.needs_netem else "unshaped"
    return {
        "link.rate": f"{format_rate(link.rate)} each way" if link.rate else nothing,
        **({"link.delay": f"{format_duration(link.delay)} of delay one way"} if link.delay else {}),
        **({"link.loss": f"{100 * link.loss:g} % of packets lost"} if link.loss else {}),
    }


def _trained(spec: RunSpec, over_all: str) -> dict[str, str]:
    """Return what our own loop trains in words, by key."""
    return {
        "model": f"{spec.model} (emulated compute)" if spec.emulated else spec.model,
        **({} if spec.emulated else {"data.name": spec.data.name}),
        **({"batch": f"batch {spec.batch}{over_all}"} if spec.batch else {}),
        **({"batch_per_rank": f"batch {spec.batch_per_rank} per rank"} if spec.batch_per_rank else {}),
    }


def _script_in_words(summaries: Sequence[Summary]) -> dict[str, str]:
    """Return a user's script in words, by key: its command, and the observed batch; empty without a script."""
    script = summaries[0].spec.script if summaries else None
    if script is None:
        return {}
    made = {"script.argv": command_line(script.argv), **({"script.as_cpu": "run on the CPU"} if script.as_cpu else {})}
    found = dict.fromkeys(batch_in_words(s, rank) for s in summaries for rank in range(len(s.images)))
    usual, comma, last = " or ".join(found).partition(",")
    made["observed batch"] = f"batches of {usual} per rank{comma}{last} (observed)"
    if set(found) <= {NOT_SEEN}:
        made["observed batch"] = "batch not seen: the script uses no DataLoader"
    return made


def batch_in_words(s: Summary, rank: int) -> str:
    """Return the images per step that a rank of a user's script fetched: `128`, `128, the last 96`, `not seen`."""
    if s.images[rank] == 0:
        return NOT_SEEN
    sizes = s.batches[rank] if rank < len(s.batches) else None
    if not sizes:
        return f"{s.images[rank]:.4g} on average"
    return ", the last ".join(map(str, sizes))


def _threads_in_words(s: Summary, each: str) -> str:
    """Return e.g. `1 thread each`; a user's script may have chosen another number than the requested one."""
    chosen = set(s.threads) or {s.spec.threads}
    least, most = min(chosen), max(chosen)
    words = f"{least} to {most} threads" if least < most else f"{most} thread{'s' * (most > 1)}"
    return f"{words}{each}{', by its own choice' if chosen != {s.spec.threads} else ''}"


def label(spec: RunSpec) -> str:
    """Return the mode as a table shows it, or the name of a user's script. Placement "after-step" has a mark.

    That placement is the mistake of published experiment R3 (experiments/r3.toml).
    """
    if spec.script is not None:
        return spec.script.name if spec.mode.is_script else f"{spec.script.name} + {spec.mode}"
    return str(spec.mode) if spec.placement == "before-step" else f"{spec.mode} (after step)"


def flatten(spec: RunSpec) -> dict[str, Any]:
    """Return the spec as JSON values by dotted keys, without keys that a user's script has no use for."""

    def walk(values: dict[str, Any], prefix: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in values.items():
            inner = value if isinstance(value, dict) and key != "overrides" else None
            found |= walk(inner, f"{prefix}{key}.") if inner is not None else {f"{prefix}{key}": value}
        return found

    values = walk(spec.model_dump(mode="json", by_alias=True), "")
    if spec.script is None:
        del values["script"]
        return values
    del values["warmup"]  # a run with --instead has a longer warm-up than the unchanged script that it is compared with
    del values["seed"]  # a script's run uses it for injected faults only
    if spec.steps is None:  # a script has no planned number of steps
        del values["steps"]
    return values


def varying_keys(summaries: Sequence[Summary]) -> list[str]:
    """Return the keys in which the runs differ. A key counts only for runs that have it: scripts lack some keys."""
    flats = [flatten(s.spec) for s in summaries]
    keys = [key for key in dict.fromkeys(key for flat in flats for key in flat) if key not in NO_COLUMN]
    return [key for key in keys if len({repr(flat[key]) for flat in flats if key in flat}) > 1]


def machine(summary: Summary) -> str:
    """Return the processor that rank 0 recorded, e.g. `Xeon E5 (8 cores)`; empty if it recorded none.

    The host name is not used, because every container has its own.
    """
    cpu, cores = summary.environment.get("cpu"), summary.environment.get("cores")
    return one_line(f"{cpu} ({cores} cores)") if cpu else ""


# The spec has no key for where a run was measured, so these columns are added if the runs differ in them.
PLACES: dict[str, Callable[[Summary], str]] = {"on": lambda s: s.substrate, "machine": machine}


def varying_places(summaries: Sequence[Summary]) -> list[str]:
    """Return the keys of PLACES in which these runs differ. Runs without a recorded value do not count."""
    return [place for place, of in PLACES.items() if len({of(s) for s in summaries} - {""}) > 1]


def short_key(key: str, among: Sequence[str]) -> str:
    """Return `lr` for `optimizer.lr`, if no other key has this last part; else the whole key."""
    last = key.rpartition(".")[2]
    return last if [other.rpartition(".")[2] for other in among].count(last) == 1 else key


def baselines(summaries: Sequence[Summary]) -> list[Summary | None]:
    """Return for each run the single-node run with the same conditions, except network and number of nodes.

    None for a control run, which does not synchronise and so has no speed-up, and for nodes without CPU quotas that
    share a machine with one processor: a single node has it for itself.
    """

    def conditions(s: Summary) -> str:
        flat = flatten(s.spec)
        network = ("link.", "overrides")
        kept = {k: v for k, v in flat.items() if k not in NOT_IN_BASELINE and not k.startswith(network)}
        places = {place: of(s) for place, of in PLACES.items()}
        return repr(sorted((kept | {"batch": s.spec.global_batch} | places).items()))

    singles: dict[str, Summary] = {}
    for s in summaries:
        if not s.spec.mode.distributed:
            singles.setdefault(conditions(s), s)

    def comparable(s: Summary) -> bool:
        shared = any(len(machine.ranks) > 1 and machine.cores == 1 for machine in s.machines)
        return not s.spec.mode.is_control and (not shared or s.spec.node.cpus is not None)

    return [singles.get(conditions(s)) if comparable(s) else None for s in summaries]


def _row(s: Summary, single: Summary | None, varying: Sequence[str]) -> tuple[str, ...]:
    base = single.seconds_per_step if single else None
    agree = "-" if s.spec.mode.silent else {True: "yes", False: "NO", None: "-"}[s.replicas_agree]
    trained = not s.spec.mode.is_control
    return (
        label(s.spec),
        *varying,
        _number(s.seconds_per_step, ".3f") + busy_mark([s]),
        f"{s.seconds_spread[0]:.3f}-{s.seconds_spread[1]:.3f}" if s.seconds_spread else "-",
        f"{base / s.seconds_per_step:.2f}" if base and s.seconds_per_step else "-",
        _number(s.test_loss if trained else None, ".3f"),
        "-" if s.test_accuracy is None or not trained else f"{100 * s.test_accuracy:.1f} %",
        _traffic(s.sent_per_step),
        agree,
    )


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _traffic(sent: list[float | None]) -> str:
    """Return megabytes (10^6 bytes) per step of rank 0, then the mean of the others; small numbers are in kB."""
    first, *others = sent or [None]
    known = [s for s in others if s is not None]
    if first is None or not known:
        return "-"
    return f"{in_megabytes(first)}, {in_megabytes(statistics.fmean(known))}"
