#!/bin/sh
# Two servers, and vllm-router before them:
#
#   start.sh PORT [ARGUMENT...]
#
# The router is at PORT, the servers and the router's metrics at the three ports after it. ARGUMENTs
# are those of `specserve serve`, for both servers. All end when the router does.
set -eu

port=${1:?the port of the router}
shift
trap 'kill $pids 2> /dev/null || true; wait' EXIT
trap 'exit 143' INT TERM
pids=

for server in 1 2; do
    specserve serve --port $((port + server)) "$@" &
    pids="$pids $!"
done

# --cache-threshold: a prompt of which less than this share is known goes to the server with the least
#   to do. It has to be above the share of what all conversations begin with, as a system prompt or a
#   file is, in their first prompts: all would go to one server otherwise.
# --cb-*: a server that has failed three times gets nothing for ten seconds. A request is tried five
#   times, so one that is for a dead server reaches another.
vllm-router --host 127.0.0.1 --port "$port" --prometheus-port $((port + 3)) \
    --worker-urls "http://127.0.0.1:$((port + 1))" "http://127.0.0.1:$((port + 2))" \
    --policy cache_aware --cache-threshold 0.5 \
    --cb-failure-threshold 3 --cb-timeout-duration-secs 10 \
    --health-check-interval-secs 5 --worker-startup-check-interval 1 &
router=$!
pids="$pids $router"
wait $router
