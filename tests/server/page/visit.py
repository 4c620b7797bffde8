"""A visit of a page in a browser."""

import json

from tests.server.server_process import payloads

SECONDS = 20
WIDE, PHONE = {"width": 1280, "height": 860}, {"width": 360, "height": 740}
QUESTION = "What does shutil.copytree do?"
ASKED = {"temperature": 0, "seed": 5, "max_tokens": 60}
COMPLETE = "#log[data-ended]"
LISTEN = """
const send = window.fetch;
window.received = [];
window.fetch = async (path, options) => {
  const response = await send(path, options);
  if (path.endsWith("completions")) response.clone().text().then((t) => received.push(t), () => {});
  return response;
};
"""


class Visit:
    """A page, its errors and warnings, and the addresses that it has requested."""

    def __init__(self, browser, url, path="", **context):
        self.context = browser.new_context(viewport=WIDE, **context)
        self.page = self.context.new_page()
        self.page.set_default_timeout(1000 * SECONDS)
        self.page.add_init_script(LISTEN)
        self.url, self.complaints, self.asked = url, [], []
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("console", self.hear)
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(url + "/" + path)

    def hear(self, message):
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)

    def close(self):
        self.context.close()
        assert self.complaints == []
        own = self.url, f"blob:{self.url}"
        assert [url for url in self.asked if not url.startswith(own)] == []

    def ready(self):
        self.page.wait_for_selector("#controls [name=max_nodes][placeholder]", state="attached")
        self.page.wait_for_function("document.querySelector('#model').textContent != 'connecting'")
        return self

    def begin(self, text, **controls):
        """Send a message, and wait for its first token."""
        self.set(**controls)
        self.page.fill("#prompt", text)
        self.page.press("#prompt", "Enter")
        self.page.wait_for_selector(".message.assistant .text > *")

    def ask(self, text, **controls):
        """Send a message, and wait for the end of the response; the events of the server."""
        self.set(**controls)
        self.page.fill("#prompt", text)
        self.page.press("#prompt", "Enter")
        self.page.wait_for_selector(COMPLETE)
        return [*payloads(self.page.evaluate("received.at(-1)").encode().splitlines())]

    def set(self, **controls):
        self.ready()
        if controls and not self.page.is_visible("#settings"):
            self.page.click("#show-settings")
            self.fill(controls)
            self.page.click("#close-settings")
        else:
            self.fill(controls)

    def fill(self, controls):
        for name, value in controls.items():
            self.page.fill(f"#controls [name={name}]", str(value))

    def drafting(self, is_on):
        if (self.page.get_attribute("#show-drafting", "aria-checked") == "true") != is_on:
            self.page.click("#show-drafting")

    def text(self):
        return self.page.locator(".message.assistant .text").last.text_content()

    def kept(self):
        kept = self.page.evaluate("localStorage.getItem('specserve.conversations')")
        return json.loads(kept or "[]")

    def reach(self, selector):
        """Press Tab until an element has the focus."""
        self.page.evaluate("document.activeElement.blur()")
        for _ in range(80):
            self.page.keyboard.press("Tab")
            if self.page.evaluate("s => document.activeElement.matches(s)", selector):
                return
        raise AssertionError(f"{selector} cannot be reached")

    def answers(self, text, tokens=()):
        """Have the page receive a text instead of the server's responses, in pieces."""
        pieces = tokens or [text[i : i + 7] for i in range(0, len(text), 7)]
        self.page.evaluate(ANSWER, pieces)


ANSWER = """
(pieces) => {
  const send = window.fetch;
  window.fetch = (path, options) => {
    if (!String(path).endsWith("chat/completions")) return send(path, options);
    const of = (content) => ({ choices: [{ delta: { content } }] });
    const event = (content) => `data: ${JSON.stringify(of(content))}\\n\\n`;
    const body = pieces.map(event).join("") + "data: [DONE]\\n\\n";
    return Promise.resolve(new Response(body, { status: 200 }));
  };
}
"""


def steps_of(events):
    choices = (c for e in events if e != "[DONE]" for c in e["choices"])
    return [step for c in choices if "speculation" in c for step in c["speculation"]["steps"]]
