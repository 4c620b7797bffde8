"""The constants of drafting and planning. A comment names unit, range and reason of each.

A test checks this form. A range says what a number can reasonably be.
"""

# --- Costs of steps (costs.py) ---
# steps; 8 to 64; fewer would follow noise, and more would follow a change late
WINDOW = 16
# rank; 0 to 4; the estimate follows fast steps, because other load makes no step faster
RANK = 2
# steps; 2 to 8; a first step is often slow, so a single one shows nothing
KNOWN = 3
# steps; 3 to 16; the fastest of so many shows the slowdown by other load
RECENT = 5
# ratio; 0.5 to 0.9; if KNOWN steps in a row are below it, all estimates are too high
TOO_HIGH = 0.75
# rows; 8 to 32; kernels compute large steps in tiles of so many
TILE = 16
# rows; 32 to 128; beyond it, buckets are as wide as tiles, and time rises within them
FINE = 4 * TILE
# seconds; 1e-4 to 1e-2; any step of one row before the first measurement
FIRST_SECONDS = 1e-3
# seconds; 1e-9 to 1e-6; a clock shows no shorter step
LEAST_SECONDS = 1e-7
# rows; 4 to 64; their work takes as long as reading the weights, until steps show it
RIDGE = 16
# ratio; 0.5 to 1; a bucket with few steps may be faster than its fastest step
HOPED = 0.8
# ratio; 1 to 4; rows beyond this multiple of the known ones are not tried
HOPE = 2
# tokens; 64 to 1024; steps whose context per row is in one power of two of it are alike
BAND = 256
# steps; 64 to 1024; an older measurement does not show how busy the machine is
LONG_AGO = 256
# steps; 1 to 32; a fit takes as long as several estimates
FIT_EVERY = 8
# steps; 0.01 to 1; weight of the prior of a fit: context and requests take no time, and attention
# of RIDGE rows takes as long as reading the KV. Less would explain noise by small differences
PRIOR = 0.1
# share; 0.01 to 0.2; rows take at least so much of a step's time
LEAST_SHARE = 0.05
# ratio; 0.005 to 0.1; a smaller change of an estimate changes no plan
CHANGED = 0.02
# steps; 256 to 4096; plans may avoid a bucket that was slow by chance, so it is forgotten
STALE = 1024
# ratio; 2 to 10; stored costs are of another machine if all first steps differ so much
WRONG = 3.0
# steps; 4 to 64; the median of so many plain steps is reported
LATEST = 16

# --- Accounts of sources (planner.py) ---
# share; 0 to 0.05; noise of a source's time and savings must not stop it
FREE = 0.02
# share; 0 to 0.01; estimates of all requests are averaged, so noise is smaller
FREE_ESTIMATES = 0.002
# weight; 0.02 to 0.2; of one step, in averages of a request and of times
RATE = 1 / 16
# weight; 0.002 to 0.02; of one step, in the average of a source that estimates
SCOPE_RATE = 1 / 128
# share; 0.002 to 0.02; trials of all sources together may lose so much of the time, and trials of
# each model
EXPLORATION = 0.005
# share; 0 to 0.3; finding out about new requests may lose so much of what a source saves
REINVESTED = 0.1
# factor; 0.9 to 0.999; an expensive trial comes again some time
FADE = 0.99
# steps; 1 to 10; a source may lose so many steps' time before it is left out
AT_FIRST = 3.0
# steps; 4 to 64; the largest debt of a budget, because a large loss may be an accident
MOST_LOST = 16.0
# steps; 2 to 32; weight of what other requests have shown, for a new one
PATIENCE = 8
# steps; 2 to 32; if no source pays, even considering them takes a share of short steps
PAUSE = 8

# --- Plans (planner.py) ---
# ratio; 0.2 to 2; least and largest share of expected draft tokens that plans count on: with none,
# no plan would have draft tokens, and nothing would correct it
KEPT = 0.5, 1.25
# probability; 0.02 to 0.3; less likely tokens are verified only where rows are free, so how many of
# them are accepted shows nothing about the others
LEAST_EXPECTED = 0.1
# ratio; 1 to 1.2; rows of unknown cost are tried only if they may be so much better
BETTER = 1.05
# ratio; 1.05 to 1.5; steps with draft tokens that take less than this multiple of the time without
# them seem to have free rows
SEEM_FREE = 1.2
# draft tokens; 1 to 16; steps of many rows compare these numbers next to the edges of buckets
FEW = 1, 2, 4, 8

# --- Levels of models (draft_depth.py) ---
# ratio; 0.5 to 0.9; the next level's nodes gain less, because their paths are longer
HOLD = 0.7
# tokens; 1 to 64; the time of catching up is spread over at least so many of a request
LEAST_USE = 8
# levels; 1 to 8; a single level after a pause takes up to three times as long as later ones
TRIED = 3

# --- Drafts (adaptive_speculator.py) ---
# draft tokens; 8 to 64; sources are asked for so many per step, shared by its requests
LEAST_ASKED = 32
# ratio; 0.3 to 1; drafting in every step takes less time than drafting after a pause
COLD = 0.6
# weight; 0.05 to 0.5; of one step, in the average size of a request's drafts
LATELY = 1 / 8

# --- Successors from logits (recycler.py) ---
# share; 0.001 to 0.01; collecting may take so much of the target's time
COLLECTING = 0.003
# share; 0 to 1; part of COLLECTING for a source that saves no time
SELDOM = 0.25
# rows; 1 to 16; a request with a long accepted path must not take the time of others
MOST_ROWS = 4
