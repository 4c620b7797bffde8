// The time series of the dashboard.

import { count, inMs } from "../shared/dom.js";
import { Chart } from "./chart.js";

const percent = (value) => `${(100 * value).toFixed(value && value < 0.1 ? 1 : 0)} %`;
const field = (name, key, isDashed = false) => ({ name, of: (sample) => sample[key], isDashed });

const PANELS = [
  {
    title: "Requests", help: "Requests in the batch and in the queue", format: count,
    lines: [field("running", "running"), field("waiting", "waiting", true)],
    empty: "Shows the requests that run and wait. Send a message in the chat.",
  },
  {
    title: "Throughput", help: "Output tokens of all requests",
    format: (value) => `${count(Math.round(value))} tokens/s`,
    lines: [field("tokens", "tokens_per_second")],
    empty: "Shows the output tokens of all requests per second.",
  },
  {
    title: "TTFT", help: "Time from a request to its first token", format: inMs,
    lines: [field("p50", "ttft_ms_p50"), field("p95", "ttft_ms_p95", true)],
    empty: "Shows the time to the first token: the median and the 95th percentile.",
  },
  {
    title: "TPOT", help: "Time per output token after the first", format: inMs,
    lines: [field("p50", "tpot_ms_p50"), field("p95", "tpot_ms_p95", true)],
    empty: "Shows the time per output token: the median and the 95th percentile.",
  },
  {
    title: "Tokens per step", help: "Output tokens per request and step. Without drafting it is 1",
    format: (value) => value.toFixed(2),
    lines: [field("tokens", "tokens_per_step")],
    empty: "Shows how many tokens a step adds to a request. Without drafting it is 1.",
  },
  {
    title: "KV cache in use", help: "Share of KV blocks that requests hold", format: percent,
    lines: [field("in use", "kv_usage")],
    empty: "Shows the share of KV blocks that requests hold.",
  },
  {
    title: "Prefix hit rate", help: "Share of prompt tokens found in the prefix cache", top: 1,
    hasZeros: true,
    format: percent, lines: [field("hits", "prefix_hit_rate")],
    empty: "Shows the share of prompt tokens that the prefix cache already had.",
  },
];

export const makeCharts = () => PANELS.map((panel) => new Chart(panel));

// Errors and restarts as marks of the charts.
export function marksOf(samples) {
  return samples.flatMap(({ at, errors, restarts }) => [
    ...(restarts ? [{ at, kind: "restart", words: "engine restarted" }] : []),
    ...(errors ? [{ at, kind: "failure", words: `${count(errors)} failed` }] : []),
  ]);
}
