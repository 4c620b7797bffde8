#!/bin/sh
# Start two specserve servers and vllm-router:
#
#   start.sh PORT [ARGUMENT...]
#
# The router listens at PORT. The servers and the router's metrics use the next three ports. Both
# servers get the ARGUMENTs of `specserve serve`. All processes end with the router.
set -eu

port=${1:?Usage: start.sh PORT [ARGUMENT...]}
shift
trap 'kill $pids 2> /dev/null || true; wait' EXIT
trap 'exit 143' INT TERM
pids=

for server in 1 2; do
    specserve serve --port $((port + server)) "$@" &
    pids="$pids $!"
done

# --cache-threshold: share of a prompt that a server must have cached to get it. Other prompts go to
#   the server with the least load. Set it above the share that all conversations have in common,
#   such as a system prompt. Otherwise one server gets all of them.
# --cb-*: a server that fails three times gets no requests for ten seconds. The router retries a
#   request up to five times, so a request for a dead server reaches another one.
vllm-router --host 127.0.0.1 --port "$port" --prometheus-port $((port + 3)) \
    --worker-urls "http://127.0.0.1:$((port + 1))" "http://127.0.0.1:$((port + 2))" \
    --policy cache_aware --cache-threshold 0.5 \
    --cb-failure-threshold 3 --cb-timeout-duration-secs 10 \
    --health-check-interval-secs 5 --worker-startup-check-interval 1 &
router=$!
pids="$pids $router"
wait $router
