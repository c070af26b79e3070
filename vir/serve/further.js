"use strict";
// Tabs: what further models find in the photograph. Read before page.js, whose names it uses once the page has started.

const MOST_NAMES = 12; // of classes that are told in a sentence
let tab = null; // the number of the further model that is looked at; null: the classifier
let wanted = 0; // counts questions: an answer that comes too late is dropped

const titled = (task) => task[0].toUpperCase() + task.slice(1);
const inPercent = (share, digits) => `${(100 * share).toFixed(digits)} %`;

function tabs() {
  if (!model.also.length) return;
  const names = [["What is it?", model.model], ...model.also.map(({ task, name }) => [titled(task), name])];
  $("tabs").append(...names.map(([title, name], at) => {
    const number = at ? at - 1 : null;
    const words = [title, " ", make("small", { textContent: name })];
    const button = make("button", { type: "button", id: `tab-${at}` }, ...words);
    button.setAttribute("role", "tab");
    button.setAttribute("aria-controls", at ? "further" : "what");
    button.onclick = () => choose(number);
    return button;
  }));
  $("tabs").onkeydown = (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key], all = [...$("tabs").children];
    if (!step) return;
    event.preventDefault();
    const next = all[(all.indexOf(document.activeElement) + step + all.length) % all.length];
    next.focus();
    next.click();
  };
  $("least").oninput = () => { $("least-told").textContent = inPercent($("least").value, 0); };
  $("least").oninput();
  $("least").onchange = () => doing("Looking …", find);
  $("what").setAttribute("role", "tabpanel");
  $("what").setAttribute("aria-labelledby", "tab-0");
  $("tabs").hidden = false;
  choose(null);
}

function choose(number) {
  tab = number;
  [...$("tabs").children].forEach((button, at) => {
    const chosen = (at ? at - 1 : null) === tab;
    button.setAttribute("aria-selected", String(chosen));
    button.tabIndex = chosen ? 0 : -1; // the arrow keys lead to the others
    if (chosen && at) $("further").setAttribute("aria-labelledby", button.id);
  });
  $("what").hidden = tab !== null;
  $("further").hidden = tab === null;
  return doing("Looking …", findAnew);
}

async function findAnew() { // of another photograph or model: what was found before is no longer true
  $("scene").hidden = true;
  if (tab !== null && shown) await find();
}

async function find() {
  const number = ++wanted;
  const told = await asking("objects", { image: shown.image, model: tab, least: $("least").value });
  if (number === wanted) tellFound(told);
}

function tellFound(told) {
  const sure = told.task === "detection";
  $("scene-title").textContent = sure ? "What is there, and where" : "What every pixel belongs to";
  $("least-control").hidden = !sure;
  $("found").replaceChildren(...told.found.map(({ name, share, colour }) => {
    const bar = make("i");
    bar.style.width = `${100 * share}%`;
    if (colour) bar.style.background = `rgb(${colour.join(", ")})`;
    const words = make("span", { textContent: name }), number = make("b", { textContent: inPercent(share, 1) });
    return make("li", {}, words, make("div", {}, bar), number);
  }));
  const count = told.found.length;
  const objects = `${count || "no"} ${count === 1 ? "object" : "objects"} of which the model is at least`;
  const what = sure ? `${objects} ${inPercent(told.least, 0)} sure` : "shares of the pixels";
  const names = told.classes.slice(0, MOST_NAMES).join(", "), rest = told.classes.length - MOST_NAMES;
  $("found-note").textContent = `${called}, looked at with ${told.width} x ${told.height} px: ${what}. ` +
    `${told.model} (${told.name}) knows ${names}${rest > 0 ? ` and ${rest} more` : ""}.`;
  $("picture").src = told.picture;
  const all = told.found.map(({ name }) => name).join(", ");
  $("picture").alt = `The photograph with what was found: ${all || "nothing"}`;
  $("scene").hidden = false;
}
