// The race: runs one prompt with two settings in turn, then replays both side by side.

import { at, element, inMs } from "../shared/dom.js";
import { answer } from "./answer.js";
import { conversation, fields, learnCosts, model, wordsOf } from "./settings.js";
import { TextView } from "./text_view.js";

const CLEAR = 1.1; // minimum speed ratio that is reported
const LONGEST = 6000; // ms: a longer replay is shortened
export let isRacing = () => false;

function settings() {
  const sources = model.card?.sources ?? [];
  return [
    { name: "Drafting off", speculation: { enabled: false } },
    { name: "Drafting on", speculation: { enabled: true } },
    ...sources.map((name) => ({ name: `Only ${name}`, speculation: { sources: [name] } })),
  ];
}

class Lane {
  constructor(chosen, onChoose) {
    this.select = element("select", { "aria-label": "Drafting of this lane" });
    this.watch = element("p", { className: "watch", text: "0.000 s" });
    this.bar = element("span", { className: "bar" });
    this.text = element("div", { className: "text" });
    this.words = element("p", { className: "quiet" });
    this.box = element("div", { className: "lane" },
      element("header", {}, this.select, this.watch),
      element("div", { className: "track" }, this.bar), this.words, this.text);
    Object.assign(this, { chosen, onChoose, answer: null });
    this.fill();
  }

  get name() {
    return this.select.selectedOptions[0].textContent;
  }

  fill() {
    const options = settings().map(({ name }, i) => element("option", { value: i, text: name }));
    this.select.replaceChildren(...options);
    this.select.value = this.chosen;
  }

  clear() {
    this.answer = null;
    this.view?.close();
    this.text.replaceChildren();
    this.words.textContent = "";
    this.box.classList.remove("first");
    this.time(0, 1);
  }

  // Show a time in ms, and the share of the longest time as a bar.
  time(ms, longest) {
    this.watch.textContent = `${(ms / 1000).toFixed(3)} s`;
    this.bar.style.width = `${Math.min(100, 100 * ms / longest)}%`;
  }

  newView(onChoose) {
    this.view?.close();
    this.text.replaceChildren();
    this.view = new TextView(this.text, { onChoose, hasColors: true });
    return this.view;
  }

  async run(body, signal) {
    const view = this.newView(() => {});
    const { speculation } = settings()[this.select.value];
    this.box.classList.add("running");
    try {
      this.answer = await answer({ ...body, speculation }, signal, (got) => {
        view.update(got);
        this.time(performance.now() - got.begun, Infinity);
      });
    } finally {
      this.box.classList.remove("running");
    }
    if (!this.answer.steps.length) throw new Error("The response is empty. Try another prompt.");
    view.end();
    this.took = this.answer.steps.at(-1).at; // ms
    this.time(this.took, Infinity);
    const { timings } = this.answer.last;
    this.words.textContent = `${timings.predicted_n} tokens in ${this.answer.steps.length} steps, `
      + `TTFT ${inMs(this.answer.first)}`;
  }

  beginReplay() {
    this.newView(() => {});
    this.part = Object.create(this.answer, { text: { value: "", writable: true } });
    Object.assign(this, { all: this.answer.text, number: 0 });
  }

  // Show the response at `ms` after its start.
  replay(ms, longest) {
    const { steps } = this.answer;
    let number = this.number;
    while (number < steps.length && steps[number].at <= ms) number += 1;
    if (number > this.number) {
      this.number = number;
      this.part.text = this.all.slice(0, this.answer.unit(steps[number - 1].ends.at(-1) ?? 0));
      this.view.answer = this.part;
      this.view.draw();
    }
    this.time(Math.min(ms, this.took), longest);
  }

  endReplay(longest) {
    const view = this.newView(this.onChoose);
    view.answer = this.answer;
    view.end();
    this.time(this.took, longest);
  }
}

const frame = () => new Promise(requestAnimationFrame);

async function replay(lanes, signal) {
  for (const lane of lanes) lane.beginReplay();
  const longest = Math.max(...lanes.map((lane) => lane.took));
  const speed = Math.max(1, longest / LONGEST), begun = performance.now();
  for (let ms = 0; ms < longest && !signal.aborted; ms = speed * (performance.now() - begun)) {
    for (const lane of lanes) lane.replay(ms, longest);
    await frame();
  }
  for (const lane of lanes) lane.endReplay(longest);
}

// The result: whether the texts are the same, and which lane was faster.
function verdict(lanes) {
  const [a, b] = lanes.map((lane) => lane.answer);
  if (a.text !== b.text) {
    const isSure = model.card.row_invariant === undefined;
    return { isError: true, words: "Different texts. Drafting must not change a text"
      + `${isSure ? ", except for near-ties on GPUs. On CPUs this is a bug: please report it." : "."}` };
  }
  const [fast, slow] = [...lanes].sort((one, other) => one.took - other.took);
  const ratio = slow.took / fast.took, same = `Same text: ${a.length} characters.`;
  if (ratio < CLEAR || a.steps.length === b.steps.length) {
    return { words: `${same} Neither was clearly faster.` };
  }
  fast.box.classList.add("first");
  return { words: `${same} ${fast.name} was ${ratio.toFixed(2)} times as fast.` };
}

// Add the race. Return open(prompt), which fills in a prompt and starts.
export function addRace({ onChoose, onStart, isChatting }) {
  const lanes = [new Lane(0, onChoose), new Lane(1, onChoose)];
  at("lanes").append(...lanes.map((lane) => lane.box));
  let control = null;
  isRacing = () => control !== null;
  const say = (text, isError = false) => {
    at("verdict").textContent = text;
    at("verdict").classList.toggle("error", isError);
  };
  const run = async () => {
    const content = at("race-prompt").value;
    if (control || !content.trim()) return;
    if (isChatting()) return say("A response is streaming in the chat. Wait until it ends.");
    control = new AbortController();
    const { signal } = control;
    at("race-go").hidden = true;
    at("race-stop").hidden = false;
    for (const lane of lanes) lane.clear();
    onStart();
    try {
      const asked = fields();
      const seed = asked.seed ?? crypto.getRandomValues(new Uint32Array(1))[0];
      const messages = conversation([{ role: "user", content }]);
      for (const [i, lane] of lanes.entries()) {
        say(`Running ${i + 1} of 2: ${lane.name}`);
        await lane.run({ ...asked, seed, messages }, signal);
      }
      say("Replaying both side by side");
      await replay(lanes, signal);
      const { words, isError } = verdict(lanes);
      say(words, isError);
      await learnCosts().catch(() => {});
    } catch (error) {
      if (error.name === "AbortError") say("Stopped.");
      else say(wordsOf(error), true);
    } finally {
      control = null;
      at("race-go").hidden = false;
      at("race-stop").hidden = true;
    }
  };
  at("race-stop").onclick = (event) => event.detail > 1 || control?.abort(); // no double click
  at("race-form").onsubmit = (event) => {
    event.preventDefault();
    run();
  };
  return {
    stop: () => control?.abort(),
    fill() {
      if (lanes[0].select.options.length !== settings().length) lanes.forEach((lane) => lane.fill());
    },
    start(prompt) {
      at("race-prompt").value = prompt;
      this.fill();
      run();
    },
  };
}
