// The chat: streams an answer and says what it took.

import { byId, count, make, plural, seconds } from "./words.js";

let authorization = () => ({});

/** *headers* gives those that the gateway wants to see. */
export function talkWith(headers) {
  authorization = headers;
}

let turns = [];
let running = null; // AbortController of the answer on its way

export function showModels(names) {
  const select = byId("model");
  if (names.length && names.join("\n") !== [...select.options].map((option) => option.value).join("\n")) {
    const chosen = select.value;
    select.replaceChildren(...names.map((name) => make("option", { value: name }, name)));
    if (names.includes(chosen)) select.value = chosen;
  }
}

export function clearChat() {
  running?.abort();
  turns = [];
  byId("log").replaceChildren();
}

byId("fresh").addEventListener("click", () => {
  clearChat();
  byId("message").focus();
});
byId("stop").addEventListener("click", () => running?.abort());
byId("message").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    byId("chat-form").requestSubmit();
  }
});
byId("chat-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = byId("message").value.trim();
  if (!text || running) return;
  byId("message").value = "";
  converse(text);
});

function addTurn(role, name, text) {
  const body = make("span", {}, text);
  const facts = make("small", {});
  const log = byId("log");
  log.append(make("div", { class: `turn ${role}` }, make("b", {}, name), body, facts));
  log.scrollTop = log.scrollHeight;
  return { body, facts };
}

async function converse(text) {
  const mine = { role: "user", content: text };
  const conversation = [...turns, mine];
  addTurn("user", "You", text);
  const { body, facts } = addTurn("assistant", byId("model").value, "");
  const control = new AbortController();
  const log = byId("log");
  running = control;
  setBusy(true);
  const told = { first_s: null, usage: null, started_s: performance.now() / 1000, problem: "" };
  try {
    for await (const chunk of answer(conversation, control.signal)) {
      if (chunk.error) {
        told.problem = chunk.error.message;
        break;
      }
      const piece = chunk.choices?.[0]?.delta?.content;
      if (piece) {
        told.first_s ??= performance.now() / 1000 - told.started_s;
        const follows = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
        body.append(piece);
        if (follows) log.scrollTop = log.scrollHeight;
      }
      told.usage = chunk.usage ?? told.usage;
    }
  } catch (error) {
    told.problem = control.signal.aborted ? "stopped" : error.message;
  }
  running = null;
  setBusy(false);
  if (body.textContent) turns = [...conversation, { role: "assistant", content: body.textContent }];
  facts.textContent = summary(told, body.textContent !== "");
  facts.className = told.problem && told.problem !== "stopped" ? "bad" : "";
  log.scrollTop = log.scrollHeight;
}

function summary(told, hasText) {
  const parts = [];
  if (told.first_s !== null) parts.push(`TTFT ${seconds(told.first_s)}`);
  if (told.usage) {
    const cached = told.usage.prompt_tokens_details?.cached_tokens ?? 0;
    parts.push(`${count(cached)} of ${plural(told.usage.prompt_tokens, "prompt token")} cached`);
    const took_s = performance.now() / 1000 - told.started_s;
    parts.push(`${plural(told.usage.completion_tokens, "token")} in ${seconds(took_s)}`);
  }
  if (told.problem) parts.push(told.problem);
  return (hasText ? "\n" : "") + parts.join(" · ");
}

function setBusy(isBusy) {
  byId("log").setAttribute("aria-busy", String(isBusy)); // whole answers are read out, not pieces
  byId("send").disabled = isBusy;
  byId("stop").hidden = !isBusy;
}

async function* answer(messages, signal) {
  const body = {
    model: byId("model").value,
    messages,
    max_tokens: Number(byId("longest").value),
    stream: true,
    stream_options: { include_usage: true },
  };
  const response = await fetch("/v1/chat/completions", {
    method: "POST",
    headers: { "content-type": "application/json", ...authorization() },
    body: JSON.stringify(body),
    signal,
  });
  if (!response.ok) {
    const problem = await response.json();
    throw new Error(problem.error.message);
  }
  let rest = "";
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const data = event.replace(/^data: /, "");
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}
