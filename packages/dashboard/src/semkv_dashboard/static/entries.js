import { $, age, bytes, call, element, moment, plain, tenantText, whole } from "./util.js";

let next = "";
let shown = null; // the key of the entry in the dialog
let sure = false;
let asked = null; // the criteria that were counted last
let looked = 0;

function query(after) {
  const given = Object.fromEntries(new FormData($("find")));
  const [bound, limit] = given.age.split(":");
  const wanted = { text: given.text.trim(), model: given.model.trim(), tenant: given.tenant.trim(), uses: given.uses, order: given.order, after };
  if (bound) wanted[bound] = limit;
  return new URLSearchParams(Object.entries(wanted).filter(([, value]) => value)).toString();
}

function facts(entry) {
  return [`used ${whole(entry.uses)}${entry.uses === 1 ? " time" : " times"}`, age(entry.created), entry.model || "no model", tenantText(entry.tenant)]
    .concat(entry.tags.length ? [`labels ${entry.tags.join(", ")}`] : []);
}

function item(entry) {
  const open = element("button", "stored", undefined,
    element("p", "text", plain(entry.prompt) || "(no text: see the answer)"),
    element("div", "meta", undefined, ...facts(entry).map((fact) => element("span", "", plain(fact)))));
  open.type = "button";
  open.addEventListener("click", () => show(entry.key));
  const node = element("li", "item", undefined, open);
  node.dataset.key = entry.key;
  return node;
}

export async function find(after = "") {
  $("found").className = "dim";
  if (!after) { looked = 0; $("stored").replaceChildren(); }
  try {
    const page = await call(`entries?${query(after)}`);
    looked += page.looked;
    next = page.next;
    $("stored").append(...page.entries.map(item));
    const n = $("stored").children.length;
    const end = next ? "there are more to look through" : "that is all";
    $("found").textContent = n ? `${whole(n)} shown of ${whole(looked)} looked through; ${end}.`
      : next ? `None among the first ${whole(looked)}; show more looks further.`
        : looked ? "No entry has this. Fewer words or another tenant may find it."
          : "Nothing is stored yet. Answers of misses appear here; Overview says why some cannot be kept.";
    $("more").hidden = !next;
  } catch (error) {
    $("found").textContent = error.message;
    $("found").className = "bad";
    $("more").hidden = true;
  }
}

async function show(key) {
  try {
    const entry = await call(`entry?key=${encodeURIComponent(key)}`);
    shown = key;
    sure = false;
    const known = [["model", entry.model || "-"], ["tenant", tenantText(entry.tenant)], ["kept", moment(entry.created)],
      ["runs out", entry.expires ? moment(entry.expires) : "never"], ["uses", whole(entry.uses)], ["last used", entry.used ? age(entry.used) : "-"],
      ["labels", entry.tags.join(", ") || "-"], ["size", bytes(entry.bytes)], ["key", key]];
    $("entry-facts").replaceChildren(...known.map(([name, value]) =>
      element("div", "", undefined, element("dt", "", name), element("dd", "", plain(value)))));
    $("entry-prompt").textContent = plain(entry.prompt) || "(no text)";
    $("entry-answer").textContent = plain(entry.answer);
    $("delete").textContent = "Delete";
    $("delete").disabled = false;
    $("deleted").textContent = "";
    if (!$("entry").open) $("entry").showModal();
  } catch (error) {
    $("found").textContent = error.message;
    $("found").className = "bad";
  }
}

async function remove() {
  if (!sure) {
    sure = true;
    $("delete").textContent = "Really delete";
    $("deleted").textContent = "The answer goes, and near-repeats of this question no longer find it.";
    return;
  }
  $("delete").disabled = true;
  try {
    const { answers, donors } = await call("delete", { key: shown });
    $("deleted").textContent = `${whole(answers)} answer and ${whole(donors)} ${donors === 1 ? "donor" : "donors"} removed.`;
    document.querySelector(`[data-key="${CSS.escape(shown)}"]`)?.remove();
  } catch (error) {
    $("deleted").textContent = error.message;
  }
}

// -- many at once --

function criteria() {
  return Object.fromEntries([...new FormData($("invalidate"))].filter(([, value]) => value.trim() !== ""));
}

function say(text, bad) {
  $("counted").textContent = text;
  $("counted").className = bad ? "bad" : "";
}

async function count(event) {
  event.preventDefault();
  const wanted = criteria();
  $("remove").disabled = true;
  asked = null;
  try {
    const { count: n } = await call("invalidate", { ...wanted, dry_run: true });
    say(n === 1 ? "1 answer would be removed." : `${whole(n)} answers would be removed.`);
    asked = n ? wanted : null;
    $("remove").disabled = !n;
  } catch (error) {
    say(error.message, true);
  }
}

async function removeMany() {
  if (!asked) return;
  $("remove").disabled = true;
  try {
    const { count: n } = await call("invalidate", { ...asked, dry_run: false });
    say(n === 1 ? "1 answer was removed." : `${whole(n)} answers were removed.`);
    find();
  } catch (error) {
    say(error.message, true);
  }
  asked = null;
}

$("find").addEventListener("submit", (event) => { event.preventDefault(); find(); });
$("find").addEventListener("change", (event) => { if (event.target.tagName === "SELECT") find(); });
$("more").addEventListener("click", () => find(next));
$("close").addEventListener("click", () => $("entry").close());
$("delete").addEventListener("click", remove);
$("invalidate").addEventListener("submit", count);
$("invalidate").addEventListener("input", () => { $("remove").disabled = true; asked = null; });
$("remove").addEventListener("click", removeMany);
