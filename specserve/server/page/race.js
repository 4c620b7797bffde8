// The race: runs one prompt with two settings in turn, then replays both side by side.

import { answer } from "./answer.js";
import { conversation, fields, learnCosts, model } from "./settings.js";
import { TextView, element } from "./view.js";

export let isRacing = () => false;
const CLEAR = 1.1; // minimum speed ratio that is reported
const at = (id) => document.getElementById(id);

function settings() {
  const sources = model.card?.sources ?? [];
  return [
    { name: "no speculation", speculation: { enabled: false } },
    { name: `${model.card?.drafter ?? "all"}: all drafters`, speculation: { enabled: true } },
    ...sources.map((name) => ({ name: `only ${name}`, speculation: { sources: [name] } })),
  ];
}

class Lane {
  constructor(chosen, choose) {
    this.select = element("select", { "aria-label": "Settings of a lane" });
    this.watch = element("p", { className: "watch", text: "0.000 s" });
    this.text = element("div", { className: "text" });
    this.words = element("p", { className: "quiet" });
    this.box = element("div", { className: "lane" }, this.select, this.watch, this.words, this.text);
    Object.assign(this, { chosen, choose, answer: null });
    this.fill();
  }

  fill() {
    const options = settings().map(({ name }, i) => element("option", { value: i, text: name }));
    this.select.replaceChildren(...options);
    this.select.value = this.chosen;
  }

  clear() {
    this.answer = null;
    const text = element("div", { className: "text" }); // drops old listeners
    this.text.replaceWith(text);
    this.text = text;
    this.watch.textContent = "0.000 s";
    this.watch.classList.remove("first");
    this.words.textContent = "";
  }

  time(ms) {
    this.watch.textContent = `${(ms / 1000).toFixed(3)} s`;
  }

  async run(body, signal) {
    const view = new TextView(this.text, this.choose);
    const { speculation } = settings()[this.select.value];
    this.answer = await answer({ ...body, speculation }, signal, (got) => {
      view.update(got);
      this.time(performance.now() - got.begun);
    });
    view.end();
    this.took = this.answer.steps.at(-1).at; // ms
    this.time(this.took);
    const { timings } = this.answer.last;
    this.words.textContent =
      `${timings.predicted_n} tokens in ${this.answer.steps.length} steps`;
  }

  // Show the response as of `ms` after its start.
  replay(ms) {
    const { answer: all } = this;
    const steps = all.steps.filter((step) => step.at <= ms);
    if (steps.length > this.view.answer.steps.length) {
      this.view.answer.steps.push(...steps.slice(this.view.answer.steps.length));
      this.view.draw();
    }
    this.time(Math.min(ms, this.took));
  }

  beginReplay() {
    const all = this.answer;
    this.text.replaceChildren();
    const part = Object.create(all, { steps: { value: [] } });
    this.view = new TextView(this.text, () => {});
    this.view.answer = part;
  }

  endReplay() {
    const view = new TextView(this.text, this.choose);
    this.text.replaceChildren();
    view.answer = this.answer;
    view.end();
    this.time(this.took);
  }
}

const frame = () => new Promise(requestAnimationFrame);

async function replay(lanes) {
  for (const lane of lanes) lane.beginReplay();
  const begun = performance.now();
  const last = Math.max(...lanes.map((lane) => lane.took));
  for (let ms = 0; ms < last; ms = performance.now() - begun) {
    for (const lane of lanes) lane.replay(ms);
    await frame();
  }
  for (const lane of lanes) lane.endReplay();
}

function verdict(lanes) {
  const [a, b] = lanes.map((lane) => lane.answer);
  const ratio = Math.max(lanes[0].took / lanes[1].took, lanes[1].took / lanes[0].took);
  const first = lanes[0].took <= lanes[1].took ? lanes[0] : lanes[1];
  const same = a.text === b.text
    ? `The texts are identical: ${a.chars.length} characters.`
    : "The texts differ. On CPUs this is a bug: please report it.";
  const name = first.select.selectedOptions[0].textContent;
  if (ratio < CLEAR || a.steps.length === b.steps.length) {
    return `${same} Neither was clearly faster.`;
  }
  first.watch.classList.add("first");
  return `${same} "${name}" was ${ratio.toFixed(2)} times as fast.`;
}

export function openRace({ choose, clear, sample, isChatting }) {
  const lanes = [new Lane(0, choose), new Lane(1, choose)];
  at("lanes").append(...lanes.map((lane) => lane.box));
  at("race-prompt").value = sample;
  at("show-race").addEventListener("click", () => {
    if (lanes[0].select.options.length !== settings().length) lanes.forEach((lane) => lane.fill());
  });
  let control = null;
  isRacing = () => control !== null;
  at("race-stop").onclick = (event) => event.detail > 1 || control?.abort(); // no double click
  at("start").onsubmit = async (event) => {
    event.preventDefault();
    const content = at("race-prompt").value;
    if (control || !content.trim()) return;
    if (isChatting()) {
      at("verdict").textContent = "A response is streaming in the chat. Wait until it ends.";
      return;
    }
    control = new AbortController();
    at("race-go").hidden = true;
    at("race-stop").hidden = false;
    for (const lane of lanes) lane.clear();
    clear();
    const say = (text) => (at("verdict").textContent = text);
    try {
      const asked = fields();
      const seed = asked.seed ?? crypto.getRandomValues(new Uint32Array(1))[0];
      const messages = conversation([{ role: "user", content }]);
      for (const lane of lanes) {
        say(`running: ${lane.select.selectedOptions[0].textContent}`);
        await lane.run({ ...asked, seed, messages }, control.signal);
      }
      say("replaying both side by side");
      await replay(lanes);
      say(verdict(lanes));
      await learnCosts();
    } catch (error) {
      say(error.name === "AbortError" ? "stopped" : error.message);
    } finally {
      control = null;
      at("race-go").hidden = false;
      at("race-stop").hidden = true;
    }
  };
}
