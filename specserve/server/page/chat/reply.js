// A streaming response in the chat.

import { element } from "../shared/dom.js";
import { answer } from "./answer.js";
import { showThought } from "./messages.js";
import { conversation, learnCosts, model, showsDrafting } from "./settings.js";
import { drawSpeed, speedWords } from "./speed.js";
import * as store from "./store.js";
import { TextView } from "./text_view.js";

const SAVE_EVERY = 500; // ms between two writes of a partial response

export class Reply {
  // one: the conversation, whose last message is the question; message: the response to fill.
  constructor(one, message, made, { onChoose, onFirst }) {
    Object.assign(this, { one, message, made });
    this.messages = one.messages;
    this.control = new AbortController();
    this.onFirst = onFirst;
    this.isDropped = false; // the conversation was edited or deleted
    this.answer = null;
    this.saved = 0;
    const hasColors = showsDrafting();
    this.view = new TextView(made.text, { onChoose, isFollowed: true, hasColors });
  }

  stop() {
    this.control.abort();
  }

  // Stop, and store nothing more.
  drop() {
    this.isDropped = true;
    this.stop();
  }

  // Stream the response. Throws AbortError and Refusal; a partial response is stored first.
  async run(settings) {
    const body = { ...settings, messages: conversation(this.messages) };
    this.made.box.classList.add("streaming");
    try {
      await answer(body, this.control.signal, (got) => this.take(got));
      this.finish(false);
      await learnCosts().catch(() => {});
      this.showSpeed();
    } catch (error) {
      if (this.answer) this.finish(true);
      throw error;
    } finally {
      this.made.box.classList.remove("streaming");
    }
  }

  take(got) {
    if (!this.answer && got.first !== null) this.onFirst();
    this.answer = got;
    this.view.update(got);
    showThought(this.made, got.thought);
    this.made.thought.open = !got.text;
    const now = performance.now();
    if (now - this.drewSpeed < 150) return; // figures that change faster are unreadable
    this.drewSpeed = now;
    drawSpeed(this.made.speed, got.figures(model.plain, now));
    if (now - this.saved > SAVE_EVERY) this.save(true);
  }

  finish(isPartial) {
    this.made.note.textContent = isPartial ? "This response is incomplete." : "";
    this.view.answer = this.answer;
    this.view.end();
    this.showSpeed();
    this.save(isPartial);
  }

  showSpeed() {
    const figures = this.answer.figures(model.plain);
    drawSpeed(this.made.speed, figures);
    if (this.message.speed === undefined || !this.message.isPartial) {
      this.message.speed = speedWords(figures);
    }
  }

  // Store the response so far.
  save(isPartial) {
    if (this.isDropped || !this.answer) return;
    this.saved = performance.now();
    const { message, one, answer: got } = this;
    Object.assign(message, { content: got.text, isPartial });
    message.speed = speedWords(got.figures(model.plain));
    if (got.thought) message.thought = got.thought;
    if (!isPartial) delete message.isPartial;
    one.messages = [...this.messages, message];
    store.keep(one);
  }

  fail(text) {
    this.made.box.append(element("p", { className: "error", role: "alert", text }));
  }
}
