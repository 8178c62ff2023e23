// The page: asks for its state once a second while it is visible, draws it, and chats. No dependencies, no build.

import { clearChat, showModels, talkWith } from "./chat.js";
import { showLoad } from "./charts.js";
import { byId, count, duration, make, plural, seconds, spoken } from "./words.js";

const PERIOD_MS = 1000;
const KEPT_DECISIONS = 100; // of each kind
const KEY_NAME = "mooncake-api-key";

// --- the API key ----------------------------------------------------------------------------------------------------

const asksForKeys = document.body.dataset.apiKeys === "asked";
let key = asksForKeys ? (sessionStorage.getItem(KEY_NAME) ?? "") : "";

const authorization = () => (key ? { authorization: `Bearer ${key}` } : {});
talkWith(authorization);

function askForKey(problem) {
  byId("key-section").hidden = false;
  byId("main").hidden = true;
  byId("forget").hidden = true;
  byId("key-problem").textContent = problem;
  setVerdict("locked", "warn");
  byId("facts").textContent = "";
  byId("key").focus();
}

function setKey(given) {
  key = given;
  if (key) sessionStorage.setItem(KEY_NAME, key);
  else sessionStorage.removeItem(KEY_NAME);
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  setKey(byId("key").value.trim());
  byId("key").value = "";
  look();
});

byId("forget").addEventListener("click", () => {
  setKey("");
  clearDecisions();
  clearChat();
  askForKey("");
});

// --- the state, once a second ---------------------------------------------------------------------------------------

let timer = 0;
let isLooking = false;
let conductor = null;
let decided = 0;

async function look() {
  clearTimeout(timer);
  if (isLooking || document.hidden) return;
  if (asksForKeys && !key) {
    askForKey("");
    return;
  }
  isLooking = true;
  const shownKey = key;
  try {
    const answer = await fetch(`/page/state?after=${decided}`, { headers: authorization() });
    if (shownKey !== key) return; // it was forgotten meanwhile: nothing of it is shown
    if (answer.status === 401) {
      setKey("");
      askForKey("This API key is not known.");
      return;
    }
    if (!answer.ok) throw new Error(`the gateway answered ${answer.status}`);
    show(await answer.json());
  } catch (error) {
    setVerdict("no answer", "bad");
    setBanner(`The gateway does not answer (${error.message}). What is below may be old.`);
  } finally {
    isLooking = false;
    if (!asksForKeys || key) timer = setTimeout(look, PERIOD_MS);
  }
}

document.addEventListener("visibilitychange", look);

function show(state) {
  byId("key-section").hidden = true;
  byId("main").hidden = false;
  byId("forget").hidden = !asksForKeys;
  showModels(state.models);
  if (state.conductor !== null && conductor !== state.conductor) {
    const isAnother = conductor !== null;
    conductor = state.conductor;
    clearDecisions();
    if (isAnother) return; // its numbers count anew: ask for all of them
  }
  if (state.decided !== null) decided = state.decided;
  showDecisions(state.decisions);
  if (state.mesh === null) {
    setVerdict("no conductor", "bad");
    setBanner("The conductor does not answer: nothing new can be placed. What is below may be old.");
    return;
  }
  const mesh = state.mesh;
  setVerdict(mesh.healthy ? "healthy" : "not healthy", mesh.healthy ? "good" : "bad");
  setBanner(mesh.reasons.length ? `Not healthy: ${mesh.reasons.join("; ")}.` : "");
  byId("facts").textContent =
    `${count(mesh.placed)} placed, ${count(mesh.rejected)} rejected, up ${duration(mesh.uptime_s)}`;
  byId("instances").replaceChildren(...mesh.instances.map(instanceRow));
  byId("pool").replaceChildren(...mesh.pool.map(nodeBlock));
  const classes = mesh.classes.map(classBlock);
  byId("classes").replaceChildren(
    ...(classes.length ? classes : [make("p", { class: "quiet" }, "No request has ended yet.")]),
  );
  showLoad(mesh);
}

function setVerdict(text, tone) {
  const verdict = byId("verdict");
  if (verdict.textContent === text) return; // said once to who listens
  verdict.textContent = text;
  verdict.className = `badge ${tone}`;
  document.title = tone === "bad" ? `${text}: mooncake-mesh` : "mooncake-mesh"; // for whoever looks at the tabs only
}

function setBanner(text) {
  const banner = byId("banner");
  if (banner.textContent === text) return;
  banner.textContent = text;
  banner.hidden = !text;
}

// --- instances, pool, service levels --------------------------------------------------------------------------------

function standing(instance) {
  if (instance.health !== "alive") return [instance.health, instance.health === "dead" ? "bad" : "warn"];
  if (instance.draining) return ["draining", "warn"];
  if (["prefill", "decode"].includes(instance.role) && !instance.takes_work) return ["takes no work", "warn"];
  return ["alive", "good"];
}

function instanceRow(instance) {
  const [text, tone] = standing(instance);
  const isDead = instance.health === "dead";
  const waiting = instance.queued_jobs
    ? [count(instance.queued_jobs), make("br"), make("small", {}, plural(instance.queued_tokens, "token"))]
    : ["0"];
  const running = instance.max_batch
    ? `${count(instance.running_jobs)} of ${count(instance.max_batch)}` : count(instance.running_jobs);
  return make("tr", isDead ? { class: "dead" } : {},
    make("th", { scope: "row" }, instance.id, make("small", {}, `${instance.role} on ${instance.node}`)),
    make("td", { class: `state ${tone}` }, text),
    make("td", { class: "number" }, ...(isDead ? ["–"] : waiting)),
    make("td", { class: "number" }, isDead ? "–" : running),
    make("td", { class: "number" }, ...(isDead ? ["–"] : speed(instance))),
  );
}

function speed(instance) {
  if (instance.role === "decode" && instance.step_s) return [seconds(instance.step_s), make("br"), make("small", {}, "a step")];
  if (instance.prefill_tokens_per_s) {
    return [count(Math.round(instance.prefill_tokens_per_s)), make("br"), make("small", {}, "tokens/s")];
  }
  return ["–"];
}

function nodeBlock(node) {
  const used = Math.max(0, node.blocks - node.free - node.evictable);
  const isAlive = node.health === "alive";
  const tone = isAlive ? "quiet" : "bad";
  const ssd = node.ssd_slots
    ? tier("SSD", [["cached", node.ssd_blocks], ["free", node.ssd_slots - node.ssd_blocks]],
      `${count(node.ssd_blocks)} of ${count(node.ssd_slots)} blocks`
      + (node.ssd_faults ? `, ${plural(node.ssd_faults, "fault")}` : ""))
    : tier("SSD", [], "none");
  return make("div", { class: "node" },
    make("div", { class: "head" },
      make("h3", {}, node.node),
      make("small", { class: tone }, isAlive ? transports(node) : `${node.id} is ${node.health}`)),
    tier("DRAM", [["used", used], ["cached", node.evictable], ["free", node.free]],
      `${count(used)} in use, ${count(node.evictable)} cached, ${count(node.free)} free of ${plural(node.blocks, "block")}`),
    ssd,
  );
}

const transports = (node) => (node.transports ? `sends by ${node.transports}` : "");

function tier(name, parts, text) {
  const total = parts.reduce((sum, [, blocks]) => sum + blocks, 0);
  if (!total) return make("div", { class: "tier" }, make("span", {}, name), make("span", { class: "quiet" }, text));
  const bar = make("div", { class: "bar", "aria-hidden": "true" });
  for (const [kind, blocks] of parts) {
    const part = make("i", { class: kind });
    part.style.flex = `${blocks} 0 0`;
    if (blocks && kind !== "free") part.style.minWidth = "2px";
    bar.append(part);
  }
  return make("div", { class: "tier" }, make("span", {}, name), bar, make("small", {}, text));
}

function classBlock(one) {
  const ended = one.requests - one.cancelled;
  const share = ended ? `${Math.round((100 * one.good) / ended)} % good, ` : "";
  const refusals = Object.entries(one.refusals).map(([reason, n]) => `${spoken(reason)} ${count(n)}`);
  return make("div", { class: "class" },
    make("div", { class: "head" },
      make("h3", {}, one.name),
      make("span", {}, `${share}goodput ${one.good_per_s.toFixed(2)} requests/s`)),
    make("table", { "aria-label": `Times of class ${one.name}` },
      make("thead", {}, make("tr", {}, make("td"), ...["p50", "p90", "p99", "objective"].map(
        (name) => make("th", { scope: "col", class: "number" }, name)))),
      make("tbody", {}, latencyRow("TTFT", one.ttft), latencyRow("TBT", one.tbt))),
    make("p", { class: "quiet" },
      `${count(ended)} ended: ${count(one.good)} good, ${count(one.finished)} finished, ${count(one.refused)} refused, ` +
      `${count(one.failed)} failed; ${plural(one.wasted_tokens, "prefilled token")} wasted`),
    refusals.length ? make("p", { class: "quiet" }, `Refused: ${refusals.join(", ")}`) : null,
  );
}

function latencyRow(name, latency) {
  const cells = [latency.p50_s, latency.p90_s, latency.p99_s].map((value) => {
    const isOver = latency.objective_s !== null && value > latency.objective_s;
    const cell = make("td", { class: isOver ? "number bad" : "number" }, value ? seconds(value) : "–");
    if (isOver) cell.append(make("b", { title: "over the objective", "aria-label": ", over the objective", role: "img" }, " ▲"));
    return cell;
  });
  const objective = latency.objective_s === null ? "–" : seconds(latency.objective_s);
  return make("tr", {}, make("th", { scope: "row" }, name), ...cells, make("td", { class: "number" }, objective));
}

// --- decisions ------------------------------------------------------------------------------------------------------

function clearDecisions() {
  decided = 0;
  byId("decisions").replaceChildren();
  byId("no-decisions").hidden = false;
}

function showDecisions(fresh) {
  if (!fresh.length) return;
  const list = byId("decisions");
  byId("no-decisions").hidden = true;
  for (const decision of fresh) list.prepend(decisionItem(decision));
  for (const kind of ["placed", "rejected"]) {
    for (const old of [...list.getElementsByClassName(kind)].slice(KEPT_DECISIONS)) old.remove();
  }
}

byId("wanted").addEventListener("change", (event) => {
  byId("decisions").className = event.target.value;
});

function decisionItem(one) {
  const at = new Date(Date.now() - 1000 * one.age_s).toLocaleTimeString("en-GB");
  const isPlaced = !one.reason;
  const where = isPlaced ? `${one.prefill} → ${one.decode}` : `rejected: ${spoken(one.reason)}`;
  const facts = [plural(one.prompt_tokens, "token")];
  if (one.cached_tokens) facts.push(`${count(one.cached_tokens)} cached`);
  if (one.copy_from !== null) facts.push(`copied from ${one.copy_from}`);
  if (one.read_tokens) facts.push(`${count(one.read_tokens)} from SSD`);
  if (isPlaced) facts.push(`TTFT ≈\u00a0${seconds(one.ttft_est_s)}`);
  const details = make("details", {},
    make("summary", {},
      make("time", { class: "quiet" }, at), " ",
      make("span", { class: isPlaced ? "where good" : "where bad" }, where), " ",
      make("span", { class: "facts" }, facts.join(" · ")),
      make("span", { class: "why" }, one.why)),
  );
  details.addEventListener("toggle", () => {
    if (details.open && details.children.length === 1) details.append(candidates(one));
  });
  return make("li", { class: isPlaced ? "placed" : "rejected" }, details);
}

function candidates(one) {
  const box = make("div", { class: "candidates", tabindex: "0", role: "group", "aria-label": "Candidates" });
  const room = (candidate) => (candidate.has_room ? "yes" : "no");
  if (one.n_prefill) {
    box.append(table(`Prefill candidates, ${one.prefill_candidates.length} of ${one.n_prefill}`,
      ["instance", "queue", "first token", "cached blocks", "copied from", "room"],
      one.prefill_candidates.map((candidate) => [
        candidate.instance_id, seconds(candidate.queue_s), seconds(candidate.ttft_s),
        count(candidate.prefix_blocks), candidate.copy_from ?? "–", room(candidate)])));
  }
  if (one.n_decode) {
    box.append(table(`Decode candidates, ${one.decode_candidates.length} of ${one.n_decode}`,
      ["instance", "step", "running", "waiting", "room"],
      one.decode_candidates.map((candidate) => [
        candidate.instance_id, seconds(candidate.step_s), count(candidate.running_jobs),
        count(candidate.waiting_jobs), room(candidate)])));
  }
  box.append(make("small", {}, `decision ${one.number}, job ${one.job_id}, priority ${one.priority}`));
  return box;
}

function table(caption, names, rows) {
  return make("table", {},
    make("caption", {}, caption),
    make("thead", {}, make("tr", {}, ...names.map((name) => make("th", { scope: "col" }, name)))),
    make("tbody", {}, ...rows.map(([name, ...values]) => make("tr", {},
      make("th", { scope: "row" }, name), ...values.map((value) => make("td", {}, value))))));
}

look();
