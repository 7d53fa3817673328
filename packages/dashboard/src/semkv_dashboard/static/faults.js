import { $, element, fill, row, whole } from "./util.js";

const PARTS = {
  store: "The store failed. Look at the disk of --cache-dir, or at Redis.",
  "store: late": "The store took longer than --store-timeout.",
  keep: "An answer was not kept. The gateway's log says why.",
  "keep: late": "The store took longer than --store-timeout for an answer, which a crash may lose.",
  lookup: "A lookup failed. The gateway's log says where.",
  "lookup: late": "A lookup took too long.",
  semantic: "The search for near-repeats failed; exact repeats go on.",
  "semantic: late": "The search for near-repeats took too long, or too many waited.",
  gateway: "The gateway failed. The request was passed on.",
  worth: "Figures of what was saved cannot be written: look at the disk of --cache-dir.",
  background: "Work in the background failed. The gateway's log says where.",
  tracing: "Spans cannot be made.",
  operators: "An admin route failed.",
};
const STATUSES = {
  400: "a request that the upstream or the gateway does not understand", 401: "a key that the upstream does not know",
  403: "a key that may not do this", 404: "a model or path that the upstream does not have", 408: "a client sent too slowly",
  415: "a body with a content encoding", 429: "the upstream's rate limit, or that of feedback", 500: "the upstream failed",
  502: "the upstream did not answer", 503: "no room, or the upstream or this gateway stops", 504: "the client wanted a stored answer, and there was none",
};
const INSIDE = {
  "response fault:store get": "The store could not be read.",
  "response fault:store put": "The store did not take an answer.",
  "response fault:corrupt": "An answer failed its checksum, and was deleted.",
  "semantic fault:encoder": "The sentence encoder failed.",
};
const UNKEPT = {
  unfinished: "cut off, filtered, or without its end", empty: "it says nothing", sampled: "drawn at random",
  "invalidated or too large": "removed meanwhile, or larger than the store", rule: "an answer: rule of yours",
};
const TURNED = { connections: "too many connections", bodies: "too many unfinished bodies", unread: "clients that do not read" };
const STORE = {
  up: "answers, and takes new answers", away: "does not answer: only memory is served, for ten minutes",
  full: "full: make room, or raise Redis's maxmemory", "read-only": "read-only: see to the disk", busy: "busy: another process writes",
  disk: "the disk fails", failed: "failed: see the log",
};

function counted(counts, meaning = {}, prefix = "") {
  return Object.entries(counts || {}).filter(([name, n]) => name.startsWith(prefix) && n).sort((a, b) => b[1] - a[1])
    .map(([name, n]) => {
      const short = name.slice(prefix.length);
      return row(meaning[short] ? [short, element("small", "", meaning[short])] : short, whole(n));
    });
}

function state(name, good, text) {
  const line = row(name, text);
  line.lastChild.className = good ? "" : "bad";
  return line;
}

export function showFaults(stats) {
  const { gauges, totals, traffic } = stats;
  const late = gauges.unwritten_entries || 0;
  const guesses = totals.admin_refused || {};
  const said = totals.feedback || {};
  $("health").replaceChildren(
    state("store", stats.store === "up", STORE[stats.store] || stats.store),
    state("answers in memory alone", !late, late ? `${whole(late)}: lost if the gateway ends now` : "none"),
    state("cache_salt", !gauges.salt_refused, gauges.salt_refused ? "the upstream refuses it: tenants share its prefix cache" : "not refused"),
    state("wrong admin keys, since the start", !guesses["wrong key"], whole(guesses["wrong key"] || 0)),
    state("hits that clients call wrong", true, `${whole(said.heard || 0)} heard, ${whole((said.limited || 0) + (said.unknown || 0))} refused`),
  );
  fill("statuses", counted(traffic.sums.status, STATUSES), "No errors in this time.", 2);
  fill("faulty", counted(traffic.sums.fault, PARTS), "None in this time.", 2);
  fill("turned", counted(totals.turned_away, TURNED), "Nobody.", 2);
  const events = traffic.sums.event || {};
  const named = (...heads) => Object.fromEntries(Object.entries(events).filter(([name]) => heads.some((head) => name.startsWith(head))));
  fill("inside", counted(named("response fault:", "response unwritten:", "semantic fault:"), INSIDE), "None in this time.", 2);
  fill("unkept", counted(named("response refused:"), UNKEPT, "response refused:"), "None in this time: every whole answer was kept.", 2);
  const vetoes = counted(named("semantic veto:"), {}, "semantic veto:");
  const others = counted(named("semantic refused", "semantic barred"),
    { refused: "by --policy", barred: "found wrong before" }, "semantic ");
  fill("vetoes", vetoes.concat(others), "None in this time.", 2);
  fill("headers", counted(totals.headers), "None: every header that came is known.", 2);
}
