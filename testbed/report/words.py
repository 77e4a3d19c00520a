"""How to read each table and plot: the small print, in one place; and how seconds are spelled."""

ONE_RUN = "The interval of a cell with one run is of steps within that run: it knows nothing of how runs differ."
MODES = (
    "s/iter is the median (every:K: the mean) over steps of the mean over ranks, warm-up left out, repeats pooled; its"
    " interval is a bootstrap's, which with one run knows nothing of how runs differ. Speed-up is over one node with"
    " the same batch and the same share of the machine."
)
SPLIT = (
    "Seconds, mean over steps and ranks. Exposed: the loop stood still for communication. Hidden: communication went on"
    " while the loop computed. Of all communication, waiting is before the last rank joined, transfer is after."
    " Last to join: the rank that the others waited for most, and how often it was the last."
    " A run with spans = false recorded none of it."
)
TRAFFIC = (
    "MB (10^6 bytes) per rank and step. Theory is payload; the kernel counts headers too: 0.2 % where it sees packets"
    " before they are cut into frames, up to 4.6 % where it sees frames. Shares: what all that was sent from the"
    " first step on was made of (of a restarted run: the first of its last attempt), and the MB per rank that went"
    " before it (probe, rendezvous, a first broadcast)."
    " Headers and control (heartbeats, agreement) are what is left; no counter tells them apart, because the kernel may"
    " count packets before or after they are cut into frames."
)
WIRE = (
    "S: bytes of the gradient, B: payload rate of the slowest link on the receipt (gather and server: of rank 0's)."
    " Algorithm bandwidth is S over the time of communication; bus bandwidth is that times 2(N-1)/N, what a ring would"
    " move over each link. Used of the link: what the busiest rank sent or received, whichever is more, over the time"
    " of communication and its rate on the receipt; a link that is used one way at a time reaches half."
)
NETWORK = "On the wire, each way, headers included; measured on every directed link and on the fan-in before training."
WHERE_TIME_GOES = (
    "Mean over steps and ranks. Blocked is timed in the training loop, communication in the layer that sends. Hatched"
    " is communication that ran while the loop computed, and so cost nothing."
)
BYTES = "Counted by the kernel at the node's interface, headers included; theory is payload alone."
ROOFLINE = (
    "The least is the bytes over the busiest link, divided by the payload rate that the probe measured before training,"
    " plus the delay of each hop. Waiting for a slower rank counts as communication here."
)
TIMELINE = (
    "The step nearest to the median, as rank 0 saw it. Upper strip: the training loop. Lower strip: each buffer, from"
    " the moment it was handed to the network until it was back. Under backward it is free, under red it is not."
)
RANKS = (
    "As R0 prints it: losses are of the step itself on this rank; times leave warm-up out. Shares are torch.profiler's,"
    " where it was on."
)
EPOCH_TIME = (
    "Seconds per epoch are extrapolated: images of the training set over images per second of the steps that counted."
    " Speed-up is by images per second over one worker with the same batch per worker."
)
STRAGGLER = (
    "A rank is named for its CPU when it computes an image at least 1.25 times as long as the median of the others,"
    " over all and in three of four steps; for its link when its rate on the receipt is at most 0.8 of the others'."
)

FAULTS = (
    "Noticed after: seconds from the fault to the middle one of the ranks that ended because of it. Named right: most"
    " of them blamed the rank that it was done to. Codes are those of the first attempt: -9 is SIGKILL, 6 a rank that"
    " lost another, stopped one that the controller ended. Recovered: `went on` by itself, or `restarted` from a"
    " checkpoint. A fault whose moment never came was not injected, and says so."
)
