// The live page: shows what `GET /v1/live` tells, and calls /v1/requests, /v1/dead and /v1/pauses.
// Everything from outside becomes a text node: what a model or a requester wrote is hostile.
"use strict";

const KEY = "lanekeeper-key";
const $ = (id) => document.getElementById(id);
const DASHES = [[], [8, 4], [2, 3], [8, 3, 2, 3], [12, 4], [4, 4]];

/** An element; strings among its children become text nodes. */
function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value != null) made.setAttribute(name, value);
  }
  made.append(...children.flat().filter((child) => child != null));
  return made;
}

/** Set the text only if it changed: an unchanged page costs no layout. */
function text(node, value) {
  if (node.textContent !== value) node.textContent = value;
}

/** What an object has under a name that others chose. */
const own = (object, name) => (object != null && Object.hasOwn(object, name) ? object[name] : undefined);

/** Draw again only if the data changed, so that focus and selection stay. */
const drawn = new WeakMap();
function draw(node, data, make) {
  const now = JSON.stringify(data);
  if (drawn.get(node) === now) return;
  drawn.set(node, now);
  node.replaceChildren(...[make(data)].flat());
}

const count = (n) => (n == null ? "–" : n < 10000 ? String(n) : n < 1e6 ? `${(n / 1000).toFixed(n < 1e5 ? 1 : 0)}k` : `${(n / 1e6).toFixed(1)}M`);
const seconds = (s) => (s < 100 ? `${s.toFixed(s < 10 ? 1 : 0)} s` : s < 6000 ? `${Math.round(s / 60)} min` : `${Math.round(s / 3600)} h`);
const ms = (value) => (value == null ? "–" : value < 1000 ? `${Math.round(value)} ms` : seconds(value / 1000));
const dollars = (usd) => `$${usd < 1 ? usd.toFixed(4) : usd.toFixed(2)}`;
const many = (n, word) => `${count(n)} ${word}${n === 1 ? "" : "s"}`;
const clock = (at) => new Date(at).toLocaleString([], Math.abs(Date.now() - new Date(at)) < 43e6 ? { timeStyle: "medium" } : { dateStyle: "short", timeStyle: "short" });

// ---- calls ----------------------------------------------------------------------------------------------------------

function headers(more = {}) {
  const key = sessionStorage.getItem(KEY);
  return key ? { authorization: `Bearer ${key}`, ...more } : more;
}

/** The answer's JSON. Throws an Error with the problem's own words. */
async function call(method, path, body) {
  const options = { method, headers: headers(body === undefined ? {} : { "content-type": "application/json" }) };
  if (body !== undefined) options.body = JSON.stringify(body);
  const answer = await fetch(path, options);
  const told = await answer.text();
  let found = {};
  try { found = JSON.parse(told); } catch { /* an empty answer, or one of a proxy */ }
  if (answer.status === 422 && found.refused) return found;
  if (!answer.ok) throw Object.assign(new Error(found.detail ?? found.error?.message ?? `${answer.status} ${answer.statusText}`), { status: answer.status });
  return found;
}

/** Follow /v1/live by fetch, because EventSource sends no key. Begins again by itself, at most every 10 s. */
let following = null;
async function follow() {
  let pause = 500;
  for (;;) {
    following = new AbortController();
    try {
      const answer = await fetch("v1/live", { headers: headers({ accept: "text/event-stream" }), signal: following.signal });
      if (answer.status === 401 || answer.status === 403) {
        state("lost", answer.status === 401 ? "a key is needed" : "this key may not look");
        if (!$("dialog").open) askForKey((await answer.json().catch(() => ({}))).detail);
        await new Promise((again) => addEventListener("keychange", again, { once: true }));
        continue;
      }
      if (!answer.ok) throw new Error(`${answer.status}`);
      const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      for (let rest = ""; ;) {
        const { value, done } = await reader.read();
        if (done) break;
        const events = (rest + value).split("\n\n");
        rest = events.pop();
        for (const event of events) take(event);
        pause = 500;
      }
    } catch (error) {
      if (error.name === "AbortError" && document.hidden) await new Promise((again) => document.addEventListener("visibilitychange", again, { once: true }));
    }
    state("lost", "reconnecting");
    await new Promise((again) => setTimeout(again, pause));
    pause = Math.min(10000, 2 * pause);
  }
}
document.addEventListener("visibilitychange", () => document.hidden && following?.abort());

function take(event) {
  const fields = Object.fromEntries(event.split("\n").map((line) => [line.slice(0, line.indexOf(":")), line.slice(line.indexOf(":") + 2)]));
  if (!fields.data) return;
  const data = JSON.parse(fields.data);
  if (fields.event === "history") history = data;
  if (fields.event === "status") show(data);
}

function state(name, words) {
  $("link").dataset.state = name;
  text($("link"), words);
}

// ---- what is shown --------------------------------------------------------------------------------------------------

let history = { points: [], marks: [] };
let latest = null;
let deadShown = null;
let deadAsked = false;

function show(found) {
  latest = found;
  const stopped = alarm(found);
  const workers = many(found.workers.length, "worker");
  state(stopped ? "stopped" : "live", stopped ? `${many(stopped, "problem")}, ${workers}` : `live, ${workers}`);
  totals(found);
  lanes(found);
  chart(found);
  accounts(found);
  tenants(found);
  groups(found);
  failures(found);
  pauses(found);
  schedules(found);
  webhooks(found);
  if (found.dead !== deadShown && !deadAsked) dead(found.dead);
}

/** One line for each thing that stops work; returns how many there are. */
function alarm(found) {
  const idle = found.workers.length ? found.lanes.filter((lane) => lane.workers === 0) : [];
  const wrong = [
    ...(found.trouble ? [`The broker gives no status: ${found.trouble}`] : found.workers.length ? [] : ["No worker answers: no request is worked on."]),
    ...(found.troubles ?? []),
    ...idle.map(({ lane }) => `No worker takes requests of the lane ${lane}.`),
    ...(found.paused ?? []).map((line) => `Provider ${line}`),
    ...(found.breakers ?? []).map((line) => `Circuit breaker of ${line}`),
    ...(found.caps ?? []).map((name) => `The ${name} is reached: its requests wait for the next period, or are refused.`),
  ];
  $("alarm").hidden = !wrong.length;
  draw($("alarm"), wrong, () => wrong.map((line) => el("li", {}, line)));
  return wrong.length;
}

function totals(found) {
  const spent = Object.values(found.spent?.lane ?? {}).reduce((sum, each) => sum + (each.usd ?? 0), 0);
  const sum = (name) => found.lanes.reduce((total, lane) => total + (lane[name] ?? 0), 0);
  draw($("totals"), [["waiting", count(found.lanes.reduce((total, lane) => total + (lane.depth ?? 0) + limited(lane), 0))], ["put off", count(found.workers.length ? sum("delayed") : found.in_delays)], ["running", count(found.lanes.reduce((total, lane) => total + (lane.running ?? 0) - limited(lane), 0))], ...(found.in_batches ? [["in batches", count(found.in_batches)]] : []), ["dead letters", count(found.dead)], ["spent", dollars(spent)]],
    (pairs) => pairs.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", { class: name === "dead letters" && found.dead ? "bad" : "" }, value))));
}

/** Lane cards are made once, and then only their texts and widths change. */
const cards = new Map();
function lanes(found) {
  const names = found.lanes.map((lane) => lane.lane);
  if (names.join() !== [...cards.keys()].join()) {
    cards.clear();
    names.forEach((name, n) => cards.set(name, card(name, n)));
    $("lanes").replaceChildren(...[...cards.values()].map((each) => each.root));
  }
  const most = Math.max(10, ...found.lanes.map(unstarted));
  for (const lane of found.lanes) fill(cards.get(lane.lane), lane, most, paused(found, "lane", lane.lane));
}

function card(name, n) {
  const made = { name };
  const part = (tag, key, attributes = {}) => (made[key] = el(tag, attributes));
  const bar = (key) => el("div", { class: "bar" }, part("i", key));
  made.root = el("article", { class: "lane", "aria-label": `lane ${name}` },
    el("div", {}, el("h3", {}, name), part("span", "tag", { class: "tag", hidden: true })),
    el("div", { class: "waiting" }, part("div", "depth", { class: "big" }), bar("depthBar"), part("small", "delayed")),
    el("div", { class: "run" }, part("div", "running", { class: "big" }), part("div", "slots", { class: "slots", "aria-hidden": "true" }), part("small", "limit")),
    el("div", { class: "rate" }, part("div", "rate", { class: "big" }), part("small", "done")),
    el("div", { class: "waits" }, part("table", "waits")),
    el("div", {}, part("button", "brake", { class: "small" })));
  made.root.style.setProperty("--c", `var(--lane${n % 6})`);
  made.brake.addEventListener("click", () => (made.pause ? release(made.pause) : brake({ kind: "lane", name })));
  return made;
}

function unit(node, value, words) {
  draw(node, [value, words], () => [document.createTextNode(value), el("small", {}, ` ${words}`)]);
}

const limited = (lane) => Object.values(lane.limited ?? {}).reduce((sum, each) => sum + each, 0);
/** All requests of a lane that no call is made for now: in its queues, put off, or in a slot but held by a limit. */
const unstarted = (lane) => (lane.depth ?? 0) + (lane.delayed ?? 0) + limited(lane);

/** Why requests are put off, in the words of docs/README.md; a reason that is missing here is shown as it is. */
const WHY = {
  rpm: "limit of requests a minute", itpm: "limit of input tokens a minute", otpm: "limit of output tokens a minute", concurrency: "limit of calls at a time",
  lane: "cap of the lane", tenant: "cap of the tenant", key: "cap of the API key", user: "cap of the user",
  paused: "a pause", breaker: "circuit breaker open", retry: "retry after an error", scheduled: "not due yet", pipeline: "items of the pipeline run",
  store: "store away", suspect: "a worker died with it", slots: "no free slot",
};

function fill(made, lane, most, pause) {
  const slots = lane.slots == null ? null : lane.slots + (lane.due_slots ?? 0);
  const whole = unstarted(lane);
  unit(made.depth, lane.depth == null ? "–" : count(whole), lane.delayed ? "waiting or put off" : "waiting");
  made.depthBar.style.width = `${100 * Math.log1p(whole) / Math.log1p(most)}%`;
  const queued = whole !== lane.depth && lane.depth ? [`${count(lane.depth)} in the queue`] : [];
  const held = Object.entries(lane.limited ?? {}).map(([why, of]) => `${count(of)} held: ${WHY[why] ?? why}`);
  text(made.delayed, [...queued, ...held, ...Object.entries(lane.delayed_for ?? {}).map(([why, of]) => `${count(of.count)} put off: ${WHY[why] ?? why}, until ${clock(Date.now() + 1000 * of.last_in_s)}`)].join(" · "));
  unit(made.running, lane.running == null ? "–" : count(lane.running - limited(lane)), slots == null ? "running" : `of ${slots} slots`);
  draw(made.slots, [(lane.running ?? 0) - limited(lane), lane.running ?? 0, Math.min(slots ?? 0, 64)], ([on, taken, all]) => Array.from({ length: all }, (_, n) => el("i", { class: n < on ? "on" : n < taken ? "held" : "" })));
  text(made.limit, lane.slots_limit ? `no more slots: ${WHY[lane.slots_limit] ?? lane.slots_limit}` : lane.extra_slots ? `${lane.extra_slots} lent or added` : "");
  unit(made.rate, count(lane.throughput_per_min), "a minute");
  draw(made.done, [lane.answered, lane.retried, lane.failed], ([done, retried, failed]) => [`${count(done)} done, ${count(retried)} retried, `, el("span", { class: failed ? "bad" : "" }, `${count(failed)} failed`)]);
  draw(made.waits, [lane.wait_ms, lane.run_ms], () => [
    el("tr", {}, el("th"), ...["p50", "p95", "p99"].map((each) => el("th", { class: "n" }, each))),
    ...[["wait, 5 min", lane.wait_ms?.["5m"]], ["wait, hour", lane.wait_ms?.["1h"]], ["run, 5 min", lane.run_ms?.["5m"]]].map(([words, of]) =>
      el("tr", {}, el("th", {}, words), ...["p50", "p95", "p99"].map((each) => el("td", { class: "n" }, ms(of?.[each]))))),
  ]);
  made.pause = pause;
  made.root.classList.toggle("braked", Boolean(pause));
  made.tag.hidden = !pause && lane.workers !== 0;
  const going = pause ? underWay(latest, pause) : "";
  text(made.tag, pause ? `${going ? "pausing" : "paused"}${pause.until ? ` until ${clock(pause.until)}` : ""}` : "no worker");
  made.tag.title = pause ? `by ${pause.who}${pause.why ? `: ${pause.why}` : ""}${going ? `; ${going}` : ""}` : "";
  text(made.brake, pause ? "Release" : "Brake");
  made.brake.setAttribute("aria-label", `${pause ? "Release" : "Brake"} lane ${made.name}`);
}

let plot = null;
let plotted = "";
/** What the chart can draw: of a minute's point, or of a lane as it is now, the number to draw. */
const DRAWN = {
  p50: { words: "half waited less than", point: (each, lane) => own(each.waits, lane)?.p50, live: (lane) => lane.wait_ms?.["5m"]?.p50 },
  p95: { words: "95 of 100 waited less than", point: (each, lane) => own(each.waits, lane)?.p95, live: (lane) => lane.wait_ms?.["5m"]?.p95 },
  p99: { words: "99 of 100 waited less than", point: (each, lane) => own(each.waits, lane)?.p99, live: (lane) => lane.wait_ms?.["5m"]?.p99 },
  done: { words: "answered in each minute", point: (each, lane) => own(each.done, lane) },
  failed: { words: "failed in each minute", point: (each, lane) => own(each.failed, lane) },
  retried: { words: "retried in each minute", point: (each, lane) => own(each.retried, lane) },
};
const minutes = (at) => new Date(at).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit" });
const lastHour = () => {
  const now = latest.at_ms / 1000;
  return [Math.max(now - 3600, Math.min((history.points[0]?.at_ms ?? latest.at_ms) / 1000, now - 600)), now];
};

const OF_TIME = {
  filter: (_, at) => at,
  splits: (_, n, low, high) => [0.001, 0.01, 0.1, 1, 10, 60, 600, 3600, 36000, 360000].filter((s) => s >= low && s <= high),
  values: (_, at) => at.map((s) => ms(1000 * s)),
};

/** Bands for what stopped work, lines for restarts, behind the curves. */
function drawMarks(u) {
  const { left, top, width, height } = u.bbox;
  u.ctx.save();
  for (const mark of history.marks) {
    const isMoment = mark.from_ms === mark.to_ms;
    const from = Math.max(left, u.valToPos(mark.from_ms / 1000, "x", true));
    const to = Math.min(left + width, Math.max(u.valToPos(mark.to_ms / 1000, "x", true), from + 2));
    if (to <= left || from >= left + width) continue;
    u.ctx.fillStyle = isMoment ? markColours.soft : markColours.bad;
    u.ctx.globalAlpha = isMoment ? 0.8 : 0.14;
    u.ctx.fillRect(from, top, to - from, height);
  }
  u.ctx.restore();
}

const markColours = {};
function chart(found) {
  const chosen = DRAWN[$("drawn").value];
  const names = found.lanes.map((lane) => lane.lane);
  const isTime = Boolean(chosen.live);
  const points = history.points.filter((each) => found.at_ms - each.at_ms < 3600e3);
  const rows = points.map((each) => [each.at_ms, names.map((name) => chosen.point(each, name))]);
  if (chosen.live) rows.push([found.at_ms, found.lanes.map(chosen.live)]);
  const scaled = (value) => (value == null ? null : isTime ? Math.max(1, value) / 1000 : value);
  const data = [rows.map(([at]) => at / 1000), ...names.map((_, n) => rows.map(([, values]) => scaled(values[n])))];
  const width = $("plot").clientWidth;
  const look = getComputedStyle(document.documentElement);
  const shade = document.createElement("i");
  document.body.append(shade);
  const colour = (name) => { shade.style.color = `var(${name})`; return getComputedStyle(shade).color; };
  const kind = [names.join(), width, colour("--paper"), chosen.words].join();
  if (kind !== plotted && width) {
    plotted = kind;
    plot?.destroy();
    Object.assign(markColours, { bad: colour("--bad"), soft: colour("--soft") });
    const axis = { stroke: colour("--soft"), grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false }, font: `12px ${look.fontFamily}` };
    const y = isTime ? { distr: 3, range: (_, low, high) => [Math.min(0.001, low ?? 0.001), Math.max(10, (high ?? 10) * 1.5)] } : { range: (_, low, high) => [0, Math.max(5, (high ?? 5) * 1.1)] };
    plot = new uPlot({
      width, height: 210, cursor: { y: false }, scales: { x: { range: lastHour }, y }, hooks: { drawClear: [drawMarks] },
      axes: [{ ...axis, space: 80, incrs: [60, 120, 300, 600, 900], values: (_, at) => at.map((s) => minutes(1000 * s)) },
        { ...axis, size: 60, ...(isTime ? OF_TIME : {}) }],
      series: [{}, ...names.map((name, n) => ({ label: name, stroke: colour(`--lane${n % 6}`), width: 2, dash: DASHES[n % DASHES.length], spanGaps: false, points: { show: data[0].length < 3 } }))],
    }, data, $("plot"));
    $("legend").replaceChildren(`${chosen.words}: `, ...names.map((name, n) => { const b = el("b", {}, `${["━", "╌", "┈", "╍"][n % 4]} ${name}`); b.style.color = `var(--lane${n % 6})`; return b; }));
  } else plot?.setData(data);
  shade.remove();
  draw($("marks"), history.marks, (all) => all.slice(-8).reverse().map((mark) => el("li", {}, mark.from_ms === mark.to_ms ? minutes(mark.from_ms) : `${minutes(mark.from_ms)} to ${minutes(mark.to_ms)}`, ` ${mark.what}`)));
}

function accounts(found) {
  const lines = [...(found.paused ?? []), ...(found.breakers ?? []), ...(found.waiting ?? [])];
  draw($("accounts"), [found.accounts, found.reserves, lines, found.spent?.lane, found.simulated?.length], ([budget, reserves, told, spent, simulated]) => [
    ...Object.entries(budget ?? {}).flatMap(([account, limits]) => [el("div", { class: "note" }, account), ...Object.entries(limits).map(([limit, of]) => budgetBar(limit, of, reserves?.[account] ?? {}))]),
    ...told.map((line) => el("p", { class: (found.waiting ?? []).includes(line) ? "note" : "note bad" }, line, (found.paused ?? []).includes(line) ? probing(line.split(": paused for ")[0]) : null)),
    table(["lane", "requests", "tokens", "money", "saved"], Object.entries(spent ?? {}).map(([lane, of]) => [lane, count(of.requests), count(of.tokens), dollars(of.usd ?? 0), of.saved_usd ? dollars(of.saved_usd) : "–"])),
    told.length ? "" : el("p", { class: "note" }, simulated ? "The provider is simulated: nothing is spent." : "No provider is paused, no breaker open, nothing waits for a budget."),
  ]);
}

const TENANTS = 20;

/** The tenants that have most waiting, running and spent. */
function tenants(found) {
  const all = Object.create(null); // a tenant may be named __proto__ or constructor
  const of = (name) => (all[name] ??= { running: 0, in_hand: 0, waits: 0, waited_ms: 0, requests: 0, usd: 0 });
  for (const lane of Object.values(found.tenants ?? {})) {
    for (const [name, figures] of Object.entries(lane)) {
      for (const what of ["running", "in_hand", "waits", "waited_ms"]) of(name)[what] += figures[what] ?? 0;
    }
  }
  for (const [name, { requests, usd }] of Object.entries(found.spent?.tenant ?? {})) Object.assign(of(name), { requests, usd: usd ?? 0 });
  const rows = Object.entries(all).sort(([, a], [, b]) => b.in_hand - a.in_hand || b.running - a.running || b.usd - a.usd || b.waits - a.waits);
  draw($("tenants"), rows.slice(0, TENANTS), (shown) => (shown.length
    ? [table(["tenant", "waiting", "running", "mean wait", "requests", "money"], shown.map(([name, each]) => [
      el("span", { class: "clamp", title: name }, name || "–"), count(each.in_hand), count(each.running), each.waits ? ms(each.waited_ms / each.waits) : "–", count(each.requests), dollars(each.usd)])),
    rows.length > TENANTS ? el("p", { class: "note" }, `and ${many(rows.length - TENANTS, "other")}`) : ""]
    : el("p", { class: "note" }, "No tenant has had a request since the workers started.")));
}

/** Rows of groups are made once, and then only their texts change, so that a button stays in focus. */
let groupRows = new Map();
function groups(found) {
  const all = new Map((found.groups ?? []).map((group) => [`${group.tenant}/${group.id}`, group]));
  $("groups-section").hidden = !all.size;
  if ([...all.keys()].join() !== [...groupRows.keys()].join()) {
    groupRows = new Map([...all].map(([key, group]) => [key, groupRows.get(key) ?? groupRow(group)]));
    $("groups").replaceChildren(...[...groupRows.values()].map((row) => row.root));
  }
  for (const [key, group] of all) fillGroup(groupRows.get(key), group);
}

function groupRow({ id, tenant, lane }) {
  const [line, run] = telling();
  const row = { words: el("div"), bar: el("i"), failed: el("span", { class: "bad" }) };
  row.cancel = el("button", { class: "small", "aria-label": `Cancel group ${id}`, onclick: () => confirm(`Cancel what has not begun of the group ${id}?`) && run(async () => {
    fillGroup(row, await call("DELETE", `v1/groups/${encodeURIComponent(id)}?tenant=${encodeURIComponent(tenant)}`));
    did(row.cancel, "Cancelled");
  }) }, "Cancel");
  row.root = el("article", { class: "group" },
    el("div", {}, el("b", { class: "clamp", title: id }, id), el("div", { class: "note clamp", title: tenant }, [lane, tenant || "no tenant"].filter(Boolean).join(", ")), row.words, row.failed, el("div", { class: "bar" }, row.bar), line), row.cancel);
  return row;
}

function fillGroup(row, group) {
  const { in_progress: left, completed, failed, cancelled } = group.counts;
  const ended = completed + failed + cancelled;
  const size = group.size ?? left + ended;
  const moment = (at) => (Math.abs(Date.now() - new Date(at)) < 43e6 ? minutes(at) : clock(at));
  text(row.words, [
    `${ended.toLocaleString()} of ${size.toLocaleString()}`,
    ...(group.saved_usd ? [`${dollars(group.saved_usd)} saved`] : []),
    ...(group.status === "ended" ? [`ended ${moment(group.ended_at)}`] : group.status === "cancelling" ? ["being cancelled"] : []),
    ...(group.predicted_end_at ? [`ends about ${moment(group.predicted_end_at)}`] : []),
  ].join(", "));
  text(row.failed, [...(failed ? [`${failed.toLocaleString()} failed`] : []), ...(cancelled ? [`${cancelled.toLocaleString()} cancelled`] : [])].join(", "));
  row.bar.style.width = `${size ? 100 * ended / size : 0}%`;
  row.cancel.hidden = group.status === "ended";
}

const probing = (name) => el("button", { class: "small", onclick: () => probe(name), "aria-label": `Probe ${name} now` }, "Probe now");

/** All workers probe a paused provider now. */
async function probe(name) {
  const [line, run] = telling();
  const words = { called: "is called", resumed: "is called again", paused: "stays paused", probing: "has not answered yet" };
  open(`Probe ${name}`, line, el("div", { class: "row end" }, closing()));
  await run(async () => {
    const { state, workers } = await call("POST", `v1/providers/${encodeURIComponent(name)}/probe`, {});
    const why = [...new Set(Object.values(workers).filter((each) => each.error).map((each) => `${each.reason} (${each.error})`))];
    return [`${name} ${words[state] ?? state}`, ...why].join(": ");
  });
}

const LIMITS = { rpm: "requests a minute", itpm: "input tokens a minute", otpm: "output tokens a minute", concurrency: "calls at a time" };

/** One limit of an account. Below its bar, the parts of it that are kept for each lane. */
function budgetBar(limit, { used, limit: most }, reserves) {
  if (!most) return el("div", {}, el("small", { class: "note" }, limit === "concurrency" ? `${many(Math.round(used), "call")} running, no limit` : `${count(Math.round(used))} ${LIMITS[limit] ?? limit}, no limit`));
  const part = used / most;
  const fillOf = el("i");
  fillOf.style.width = `${Math.min(100, 100 * part)}%`;
  const kept = limit === "concurrency" ? [] : Object.entries(reserves).filter(([, share]) => share > 0);
  const words = kept.map(([lane, share]) => `${lane} ${count(Math.round(share * most))}`).join(", ");
  const strip = el("div", { class: "reserves", title: `reserved: ${words}` }, kept.map(([lane, share]) => {
    const piece = el("i");
    piece.style.width = `${100 * share}%`;
    piece.style.setProperty("--c", `var(--lane${Math.max(0, [...cards.keys()].indexOf(lane)) % 6})`);
    return piece;
  }));
  return el("div", {}, el("small", { class: "note" }, `${count(Math.round(used))} of ${count(Math.round(most))} ${LIMITS[limit] ?? limit}${words ? `; reserved: ${words}` : ""}`), el("div", { class: `bar${part > 0.9 ? " full" : ""}`, role: "meter", "aria-valuenow": Math.round(100 * part), "aria-valuemin": 0, "aria-valuemax": 100, "aria-label": limit }, fillOf), kept.length ? strip : null);
}

function table(titles, rows) {
  if (!rows.length) return "";
  const attributes = (n) => (n ? { class: "n" } : {});
  return el("table", {}, el("tr", {}, titles.map((title, n) => el("th", attributes(n), title))), rows.map((row) => el("tr", {}, row.map((cell, n) => el("td", attributes(n), cell)))));
}

/** A table of names and values. */
const facts = (pairs) => el("table", {}, pairs.map(([name, value]) => el("tr", {}, el("th", { scope: "row" }, name), el("td", {}, value))));

/** A link to a trace if the snapshot names a Jaeger, else its id. */
function trace(id, shown = id) {
  const page = latest?.jaeger_url;
  if (!id || !/^https?:/.test(page ?? "")) return id ? shown : "–";
  return el("a", { href: `${page}/trace/${encodeURIComponent(id)}`, rel: "noreferrer", target: "_blank", title: `trace ${id}` }, shown);
}

function failures(found) {
  draw($("failures"), found.failures ?? [], (all) => (all.length
    ? el("table", {}, all.slice(0, 12).map((each) => el("tr", {}, el("td", { class: "t" }, clock(each.at_ms)), el("td", { class: "t" }, each.lane), el("td", { class: "bad t" }, each.code), el("td", { class: "t" }, el("button", { class: "as-link", title: each.id, onclick: () => request(each.id) }, each.id.slice(0, 8))), el("td", { class: "t", title: each.trace ?? "" }, trace(each.trace, "trace")))))
    : el("p", { class: "note good" }, "None since the workers began.")));
}

/** Pauses and releases that were asked for here and that no worker has confirmed yet, by the pause's id. */
const asked = new Map();

function pauses(found) {
  const told = found.pauses ?? [];
  for (const [id, each] of asked) {
    const known = told.find((pause) => pause.id === id);
    if (each.ends ? !known : known?.since === each.since) asked.delete(id);
  }
  const all = [...told.map((pause) => ({ ...pause, ...asked.get(pause.id) })), ...[...asked.values()].filter((each) => !each.ends && !told.some((pause) => pause.id === each.id))];
  draw($("pauses"), all.map((each) => [each, underWay(found, each)]), (rows) => (rows.length
    ? el("table", {}, rows.map(([each, going]) => el("tr", {}, el("td", {}, el("b", {}, `${each.kind} ${each.name}`), going ? el("span", { class: "tag" }, going) : null, el("br"), `${each.until ? `until ${clock(each.until)}` : "until released"}, set by ${each.who}${each.why ? `: ${each.why}` : ""}`),
      el("td", { class: "n" }, el("button", { class: "small", disabled: asked.has(each.id), onclick: () => release(each) }, asked.get(each.id)?.ends ? "Released" : "Release")))))
    : el("p", { class: "note" }, "Nothing is paused.")));
}

/** What is still to happen until a pause holds, or has ended; empty: nothing. */
function underWay(found, pause) {
  const waiting = asked.get(pause.id);
  if (waiting) return waiting.ends ? "being released" : "under way: no worker has confirmed it yet";
  const runs = pause.kind === "lane" ? found.lanes.find((lane) => lane.lane === pause.name)?.running
    : pause.kind === "tenant" ? Object.values(found.tenants ?? {}).reduce((sum, of) => sum + (own(of, pause.name)?.running ?? 0), 0) : 0;
  return runs ? `under way: ${many(runs, "request")} still running` : "";
}

function schedules(found) {
  const all = Object.entries(found.schedules ?? {});
  $("schedules-section").hidden = !all.length;
  draw($("schedules"), found.schedules ?? {}, () => table(["schedule", "next", "last"], all.map(([name, each]) => [
    el("span", { title: `${each.cron} ${each.timezone}, ${each.key}` }, name),
    each.paused ? el("span", { class: "bad", title: each.paused }, "paused") : clock(each.next),
    [
      each.last ? el("button", { class: "as-link", title: each.last, onclick: () => request(each.last) }, each.last.slice(-16)) : "never",
      each.late_since || each.failed ? el("span", { class: "bad" }, each.late_since ? ` did not run at ${clock(each.late_since)}` : ` ${each.failed}`) : null,
    ],
  ])));
}

const POSTS = { running: "posts running", delivered: "delivered", retrying: "posts failed, to be made again", gone: "ended by 410", undelivered: "given up" };

function webhooks(found) {
  const counts = Object.entries(POSTS).filter(([state]) => found.webhooks?.[state]).map(([state, words]) => [words, count(found.webhooks[state])]);
  $("webhooks-section").hidden = !counts.length;
  draw($("webhooks"), counts, facts);
}

const paused = (found, kind, name) => (found.pauses ?? []).find((each) => each.kind === kind && each.name === name) ?? null;

/** How many letters of a cause there were when somebody last opened it in this browser, and when that was. */
const SEEN = "lanekeeper-dead-seen";
const seenLetters = () => JSON.parse(localStorage.getItem(SEEN) ?? "{}");
function markSeen(group) {
  const seen = Object.entries({ ...seenLetters(), [group.cause]: { count: group.count, at: Date.now() } });
  localStorage.setItem(SEEN, JSON.stringify(Object.fromEntries(seen.sort(([, a], [, b]) => b.at - a.at).slice(0, 200))));
}

function newSince(group) {
  const seen = seenLetters()[group.cause];
  const fresh = seen ? group.count - seen.count : 0;
  return fresh > 0 ? `${count(fresh)} new since ${clock(seen.at)}` : group.last_hour ? `${count(group.last_hour)} in the last hour` : "";
}

async function dead(number) {
  deadShown = number;
  if (!number) return void draw($("dead"), number, () => el("p", { class: `note${number === 0 ? " good" : ""}` }, number === 0 ? "None." : "Unknown: the broker does not tell."));
  deadAsked = true;
  try {
    const { groups, total } = await call("GET", "v1/dead?limit=0");
    if (total !== number) deadShown = null; // the gateway shows a long list for a while: ask again
    draw($("dead"), [groups, groups.map(newSince)], ([all]) => el("table", { class: "stacked" }, el("tr", {}, el("th", {}, "cause"), el("th", { class: "n" }, "letters"), el("th", {}, "lanes, tenants"), el("th", {}, "since")),
      all.map((group) => el("tr", {}, el("td", {}, el("button", { class: "as-link cause", title: group.error, onclick: () => cause(group) }, `${group.code}: ${group.error}`), group.relapses ? el("span", { class: "bad" }, ` ${group.relapses} again after a replay`) : null), el("td", { class: "n" }, count(group.count)), el("td", {}, group.lanes.join(", ") || "–", el("div", { class: "note clamp", title: group.tenants.join(", ") }, group.tenants.join(", "))), el("td", {}, clock(group.oldest), el("div", { class: "note" }, `last ${clock(group.newest)}`), newSince(group) ? el("div", { class: "note bad" }, newSince(group)) : null)))));
  } catch (error) {
    draw($("dead"), error.message, (words) => el("p", { class: "note" }, `${number} letters; ${words}`));
    deadShown = null;
  } finally { deadAsked = false; }
}

// ---- dialogs --------------------------------------------------------------------------------------------------------

function open(title, ...content) {
  const dialog = $("dialog");
  dialog.replaceChildren(el("h2", { id: "dialog-title" }, title), ...content);
  if (!dialog.open) dialog.showModal();
  dialog.querySelector("[autofocus]")?.focus();
}
const close = () => $("dialog").close();
const closing = () => el("button", { type: "button", onclick: close }, "Close");

/** A line that tells how a step ended; and a runner of steps that writes there. */
function telling() {
  const line = el("p", { class: "note", role: "status" });
  const run = async (step) => {
    text(line, "…");
    line.className = "note";
    try { text(line, (await step()) ?? ""); } catch (error) { line.className = "bad"; text(line, error.message); }
  };
  return [line, run];
}

function askForKey(why = "") {
  const input = el("input", { type: "password", autofocus: true, autocomplete: "off", "aria-label": "Key" });
  open("A key of this gateway", el("form", { onsubmit: (event) => { event.preventDefault(); sessionStorage.setItem(KEY, input.value.trim()); close(); dispatchEvent(new Event("keychange")); following?.abort(); } },
    el("p", { class: "note" }, `${why} It needs the operator right look or act, and is kept in this tab alone.`), input, el("div", { class: "row end" }, closing(), el("button", { class: "strong" }, "Use it"))));
}

async function request(id, tenant) {
  const [line, run] = telling();
  const place = el("div");
  const path = `v1/requests/${encodeURIComponent(id)}${tenant == null ? "" : `?tenant=${encodeURIComponent(tenant)}`}`;
  const cancel = el("button", { hidden: true, onclick: () => run(async () => { const { outcome } = await call("DELETE", path); did(cancel, "Cancelled"); return CANCELLED[outcome] ?? outcome; }) }, "Cancel the request");
  open(`Request ${id}`, place, line, el("div", { class: "row end" }, cancel, closing()));
  let goesOn = false;
  const look = async () => {
    const found = await call("GET", path);
    goesOn = !found.ended_at || found.webhook?.state === "retrying";
    cancel.hidden = Boolean(found.ended_at);
    draw(place, found, ({ webhook, ...rest }) => {
      const plain = Object.entries(rest).filter(([, value]) => value == null || typeof value !== "object").map(([name, value]) => [name, value === "" ? "–" : String(value ?? "–")]);
      if (webhook) plain.push(["webhook", posted(webhook)], ...webhook.errors.map((error) => ["post failed", error]));
      if (rest.problem?.trace) plain.push(["trace", trace(rest.problem.trace)]);
      return [facts(plain), ...Object.entries(rest).filter(([, value]) => value && typeof value === "object").flatMap(([name, value]) => [el("p", { class: "note" }, name), el("pre", { tabindex: 0 }, JSON.stringify(value, null, 2))])];
    });
  };
  await run(look);
  while (goesOn && place.isConnected && $("dialog").open) {
    await new Promise((again) => setTimeout(again, 2000));
    await look().catch(() => {});
  }
}

const CANCELLED = { recorded: "it is cancelled", told: "it runs: its worker was told to stop", ended: "it had ended before", unseen: "no worker has seen it: it is cancelled when it comes" };

/** A button that has done its work says so, and cannot be pressed again. */
function did(button, words) {
  text(button, words);
  button.disabled = true;
}

/** Where requests that were replayed stand, until all have ended. */
async function follows(place, requests) {
  const looks = async () => {
    const found = await Promise.all(requests.map(({ id, tenant }) => call("GET", `v1/requests/${encodeURIComponent(id)}?tenant=${encodeURIComponent(tenant)}`).catch(() => ({ id, status: "unknown" }))));
    const waits = found.map((each, n) => each.ended_at === requests[n].failed_at);
    place.replaceChildren(el("p", { class: "note" }, "what they became"), table(["id", "status"], found.map((each, n) => [el("button", { class: "as-link", onclick: () => request(each.id, requests[n].tenant) }, each.id), waits[n] ? "waits to run again" : each.problem ? `${each.status}: ${each.problem.code}` : each.status])));
    return found.some((each, n) => waits[n] || (!each.ended_at && each.status !== "unknown"));
  };
  while (requests.length && $("dialog").open && (await looks())) {
    await new Promise((again) => setTimeout(again, 2000));
    if (!place.isConnected) return;
  }
}

/** How posting an outcome went. */
function posted({ endpoint, state, attempts, at, next_at: next }) {
  return `${endpoint}: ${state} at ${clock(at)} after ${attempts} attempt${attempts === 1 ? "" : "s"}${next ? `, next at ${clock(next)}` : ""}`;
}

async function cause(group) {
  const [line, run] = telling();
  const place = el("div");
  const became = el("div");
  const rate = el("input", { type: "number", min: 0.1, step: "any", value: 5, "aria-label": "Replays a second" });
  const lane = laneChoice("as before");
  const model = el("input", { placeholder: "as before", "aria-label": "Model" });
  const edit = el("textarea", { "aria-label": "Edit", spellcheck: "false", placeholder: '{"max_tokens": 1000, "temperature": null}' });
  const how = () => ({ rate: Number(rate.value), ...(edit.value.trim() ? { edit: JSON.parse(edit.value) } : {}), ...(lane.value ? { to_lane: lane.value } : {}), ...(model.value ? { model: model.value } : {}) });
  const replay = (body) => call("POST", "v1/dead/replay", { cause: group.cause, ...how(), ...body });
  const drop = (body) => call("POST", "v1/dead/drop", { cause: group.cause, ...body });
  const all = el("button", { class: "strong", onclick: () => run(async () => {
    const found = await replay({});
    deadShown = null;
    const words = told(found, false);
    if (!found.left) did(all, "Replayed");
    follows(became, found.requests);
    return words;
  }) }, "Replay all");
  const dropping = el("button", { onclick: () => run(async () => {
    const { matched } = await drop({ dry_run: true });
    if (!confirm(`Drop ${many(matched, "dead letter")} for good?`)) return "";
    const { dropped } = await drop({});
    deadShown = null;
    if (dropped >= matched) did(dropping, "Dropped");
    return `${dropped} dropped${dropped < matched ? `, ${matched - dropped} left: drop again` : ""}`;
  }) }, "Drop all");
  open(`${group.code}: ${group.count} dead letters`, el("p", {}, group.error),
    el("details", {}, el("summary", {}, "Edit all, or move them"), el("div", { class: "row" }, el("label", {}, "lane", lane), el("label", {}, "model", model)),
      el("label", {}, "fields of the body to change (null removes one)", edit)),
    line, became, el("div", { class: "row end" },
      el("label", {}, "a second", rate), dropping,
      el("button", { onclick: () => run(async () => told(await replay({ dry_run: true }), true)) }, "Dry run"), all, closing()), place);
  markSeen(group);
  await run(async () => {
    const { letters, next } = await call("GET", `v1/dead?cause=${encodeURIComponent(group.cause)}&limit=50`);
    const note = (words) => el("div", { class: "note" }, words);
    place.replaceChildren(el("table", {}, el("tr", {}, ["id, when", "lane, app, tenant"].map((title) => el("th", {}, title))), letters.map((each) => el("tr", {},
      el("td", {}, el("button", { class: "as-link", onclick: () => letter(each.id, each.tenant) }, each.id), note(each.at ? clock(each.at) : "–")),
      el("td", {}, `${each.lane || "–"}, ${each.app || "–"}`, each.replays ? ` (replayed ${each.replays} times)` : null, note(each.tenant || "no tenant"))))));
    return next ? "the first 50 are shown" : "";
  });
}

const laneChoice = (first) => el("select", { "aria-label": "Lane" }, el("option", { value: "" }, first), (latest?.lanes ?? []).map((each) => el("option", {}, each.lane)));

/** What a replay has done. One call works for 20 s at most; what is left needs another. */
function told(replay, dry) {
  if (replay.refusals) throw new Error(`nothing was sent: ${replay.refused.map((each) => Object.values(each).join(": ")).join("; ")}`);
  return dry ? `${replay.matched} would be replayed` : `${replay.replayed} replayed${replay.left ? `, ${replay.left} left: replay again` : ""}`;
}

async function letter(id, tenant) {
  const [line, run] = telling();
  const path = `v1/dead/${encodeURIComponent(id)}?tenant=${encodeURIComponent(tenant)}`; // another tenant may have a letter of that id
  const place = el("div");
  open(`Dead letter ${id}`, place, line);
  await run(async () => {
    const found = await call("GET", path);
    let sent = null;
    try { sent = JSON.parse(found.message.body); } catch { /* it cannot be decoded: it is shown raw */ }
    const isJson = sent !== null && typeof sent === "object";
    const body = el("textarea", { "aria-label": "Body", spellcheck: "false", readonly: !isJson, autofocus: true });
    body.value = isJson ? JSON.stringify(sent, null, 2) : String(found.message.body ?? found.message.body_base64 ?? "");
    const lane = laneChoice(`as before (${found.lane ?? "?"})`);
    const became = el("div");
    const dropping = el("button", { type: "button", onclick: () => confirm("Drop this dead letter for good?") && run(async () => { await call("DELETE", path); deadShown = null; did(dropping, "Dropped"); did(replaying, "Replay"); return "dropped"; }) }, "Drop");
    const replaying = el("button", { class: "strong" }, "Replay");
    const model = el("input", { placeholder: "as before", "aria-label": "Model" });
    const replay = (dry) => run(async () => {
      const edit = isJson ? merged(sent, JSON.parse(body.value)) : undefined;
      const done = await call("POST", "v1/dead/replay", { ids: [id], tenant, ...(edit === undefined ? {} : { edit }), ...(lane.value ? { to_lane: lane.value } : {}), ...(model.value ? { model: model.value } : {}), dry_run: dry });
      const words = told(done, dry);
      if (!dry) {
        deadShown = null;
        did(replaying, "Replayed");
        did(dropping, "Drop");
        follows(became, done.requests);
      }
      return words;
    });
    place.replaceChildren(
      facts([["code", found.code], ["detail", found.detail], ["tenant", found.tenant || "–"], ["lane, application", `${found.lane ?? "–"}, ${found.app ?? "–"}`], ["attempts", String(found.attempts ?? "–")], ["when", found.at ? clock(found.at) : "–"],
        ["trace", trace(found.trace_id)]]),
      ...(found.errors?.length ? [el("pre", { tabindex: 0 }, [found.errors].flat().map((each) => (typeof each === "string" ? each : JSON.stringify(each))).join("\n"))] : []),
      el("form", { onsubmit: (event) => { event.preventDefault(); replay(false); } }, el("label", {}, "body", body),
        el("div", { class: "row end" }, el("label", {}, "lane", lane), el("label", {}, "model", model),
          dropping, el("button", { type: "button", onclick: () => replay(true) }, "Dry run"), replaying, closing())), became);
    body.focus();
  });
}

/** The JSON Merge Patch (RFC 7396) that makes `to` of `from`; undefined if they are equal. */
function merged(from, to) {
  if (JSON.stringify(from) === JSON.stringify(to)) return undefined;
  if ([from, to].some((each) => each === null || typeof each !== "object" || Array.isArray(each))) return to;
  const patch = Object.create(null);
  for (const name of new Set([...Object.keys(from), ...Object.keys(to)])) {
    if (!Object.hasOwn(to, name)) patch[name] = null;
    else {
      const part = merged(own(from, name), to[name]);
      if (part !== undefined) patch[name] = part;
    }
  }
  return patch;
}

/** The names that somebody may want to pause, of a kind. Applications and models are those of recent requests. */
async function namesOf(kind) {
  const found = latest ?? { lanes: [] };
  const known = {
    lane: () => found.lanes.map((lane) => lane.lane),
    tenant: () => [...Object.values(found.tenants ?? {}).flatMap(Object.keys), ...Object.keys(found.spent?.tenant ?? {})],
    provider: () => Object.keys(found.accounts ?? {}).map((account) => account.split("/")[0]),
    schedule: () => Object.keys(found.schedules ?? {}),
  }[kind];
  const names = known ? known() : (await call("GET", "v1/requests?limit=200").catch(() => ({ requests: [] }))).requests.map((each) => each[kind]);
  return [...new Set(names)].filter(Boolean).sort();
}

function brake({ kind = "lane", name = "" } = {}) {
  const [line, run] = telling();
  const names = el("datalist", { id: "names" });
  const kinds = el("select", { "aria-label": "What" }, ["lane", "tenant", "app", "model", "provider", "schedule"].map((each) => el("option", { selected: each === kind }, each)));
  const offer = async () => names.replaceChildren(...(await namesOf(kinds.value)).map((each) => el("option", { value: each })));
  kinds.addEventListener("change", offer);
  const who = el("input", { value: name, required: true, autofocus: !name, "aria-label": "Name", list: "names", autocomplete: "off" });
  const time = el("input", { value: "1h", placeholder: "empty: until released", "aria-label": "For" });
  const why = el("input", { placeholder: "why", autofocus: Boolean(name), "aria-label": "Why", maxlength: 200 });
  const pause = async () => {
    const made = await call("POST", "v1/pauses", { kind: kinds.value, name: who.value.trim(), ...(time.value.trim() ? { until: ending(time.value.trim()) } : {}), ...(why.value ? { why: why.value } : {}) });
    asked.set(made.id, made);
    if (latest) pauses(latest);
    close();
  };
  open("Brake", el("p", { class: "note" }, "Paused requests wait in the broker; their deadlines keep running. Running requests are not stopped. The pause is shown with your key's name."),
    el("form", { onsubmit: (event) => { event.preventDefault(); run(pause); } },
      el("div", { class: "row" }, el("label", {}, "what", kinds), el("label", {}, "name", who, names), el("label", {}, "for", time)), el("label", {}, "why", why), line,
      el("div", { class: "row end" }, closing(), el("button", { class: "strong" }, "Brake"))));
  offer();
}

/** When a time such as 30m from now ends. */
function ending(time) {
  const found = /^(\d+(?:\.\d+)?)\s*([smhd])$/.exec(time);
  if (!found) throw new Error("for: a number with s, m, h or d, such as 30m");
  return new Date(Date.now() + 1000 * found[1] * { s: 1, m: 60, h: 3600, d: 86400 }[found[2]]).toISOString();
}

async function release(pause) {
  try {
    await call("DELETE", `v1/pauses/${encodeURIComponent(pause.id)}`);
    asked.set(pause.id, { ...pause, ends: true });
    if (latest) pauses(latest);
  } catch (error) { open("Not released", el("p", { class: "bad" }, error.message), closing()); }
}

const STATES = ["", "waiting", "running", "completed", "failed", "cancelled"];
const AGES = [["", "any time"], ["600", "10 min"], ["3600", "1 h"], ["86400", "1 day"]];

/** Requests of all tenants, by a filter; all that match can be cancelled, or replayed. */
function list() {
  const [line, run] = telling();
  const place = el("div", { class: "scrolls" });
  const became = el("div");
  const fields = {
    status: el("select", {}, STATES.map((each) => el("option", { value: each }, each || "any"))),
    lane: laneChoice("any"),
    ...Object.fromEntries(["tenant", "app", "model", "code", "group"].map((name) => [name, el("input", { size: 9, autocomplete: "off", spellcheck: "false" })])),
  };
  const age = el("select", {}, AGES.map(([value, words]) => el("option", { value }, words)));
  const more = el("button", { type: "button", hidden: true, onclick: () => run(() => look(next)) }, "Older ones");
  let next = null;
  const meant = () => ({
    ...Object.fromEntries(Object.entries(fields).filter(([, field]) => field.value.trim()).map(([name, field]) => [name, field.value.trim()])),
    ...(age.value ? { since: new Date(Date.now() - 1000 * age.value).toISOString() } : {}),
  });
  const look = async (after) => {
    const query = new URLSearchParams({ limit: 50, ...meant(), ...(after ? { after } : {}) });
    const found = await call("GET", `v1/requests?${query}`);
    next = found.next;
    more.hidden = !next;
    const note = (words) => el("div", { class: "note" }, words);
    const row = (each) => el("tr", {},
      el("td", {}, el("button", { class: "as-link", title: each.id, onclick: () => request(each.id, each.tenant) }, each.id.length > 16 ? `${each.id.slice(0, 15)}…` : each.id), note(clock(each.seen_at))),
      el("td", {}, each.status, note(each.code ?? each.step ?? "")),
      el("td", {}, `${each.lane || "–"}, ${each.app || "–"}`, note([each.tenant || "no tenant", each.model].filter(Boolean).join(", "))));
    place.replaceChildren(found.requests.length ? el("table", {}, el("tr", {}, ["id, since", "status", "lane, app, tenant, model"].map((title) => el("th", {}, title))), found.requests.map(row)) : "");
    return found.requests.length ? "" : next ? `none back to ${clock(found.back_to)}` : "none";
  };
  const act = (path, number, words) => run(async () => {
    const dry = await call("POST", path, { ...meant(), dry_run: true });
    if (dry.refusals) return told(dry, true);
    if (!dry.matched || !confirm(`${words} ${many(dry.matched, "request")}?`)) return `${dry.matched} match${dry.failed > dry.matched ? `, of ${dry.failed} failed ones: the others have no dead letter` : ""}`;
    const done = await call("POST", path, meant());
    if (done.requests) follows(became, done.requests);
    await look();
    return `${done[number]} ${number}${done.left ? `, ${done.left} left: do it again` : ""}`;
  });
  open("Requests", el("form", { onsubmit: (event) => { event.preventDefault(); run(() => look()); } },
    el("div", { class: "row" }, Object.entries(fields).map(([name, field]) => el("label", {}, name, field)), el("label", {}, "since", age), el("button", { class: "strong" }, "List"))),
  place, line, became, el("div", { class: "row end" }, more, el("button", { onclick: () => act("v1/requests/cancel", "cancelled", "Cancel") }, "Cancel all"), el("button", { onclick: () => act("v1/requests/replay", "replayed", "Replay") }, "Replay all"), closing()));
  run(() => look());
}

// ---- keys -----------------------------------------------------------------------------------------------------------

$("find").addEventListener("submit", (event) => { event.preventDefault(); const typed = event.target.elements.id.value.trim(); if (typed) request(typed); });
$("listing").addEventListener("click", list);
$("braking").addEventListener("click", () => brake());
$("key").addEventListener("click", () => askForKey());
$("theme").addEventListener("click", () => {
  const root = document.documentElement;
  const isDark = (root.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  root.dataset.theme = isDark ? "light" : "dark";
  localStorage.setItem("lanekeeper-theme", root.dataset.theme);
});
document.addEventListener("keydown", (event) => {
  if ($("dialog").open || event.ctrlKey || event.metaKey || event.altKey || /INPUT|TEXTAREA|SELECT/.test(event.target.tagName)) return;
  const step = { "/": () => $("find").elements.id.focus(), b: () => brake(), r: list, d: () => $("dead").querySelector("button")?.focus() }[event.key];
  if (step) { event.preventDefault(); step(); }
});
$("drawn").addEventListener("change", () => latest && chart(latest));
text($("zone"), `(times: ${Intl.DateTimeFormat().resolvedOptions().timeZone})`);
if (localStorage.getItem("lanekeeper-theme")) document.documentElement.dataset.theme = localStorage.getItem("lanekeeper-theme");
follow();
