"use strict";
// The page: one photograph at a time; whatever the server says is shown, errors too.

const $ = (id) => document.getElementById(id);
let model = null; // what /model told
let called = ""; // the name of the photograph
let shown = null; // what /answer told of the photograph
let picture = null; // the photograph itself, as the server understood it
let found = null; // what /retained told
let query = null; // [row, column] in the grid of the layer; null: whoever looks by default
let asked = 0; // counts questions about patches: an answer that comes too late is dropped
let answers = 0; // the same of questions about the photograph

async function ask(path, options) {
  let reply;
  try {
    reply = await fetch(path, options);
  } catch {
    throw new Error("The server does not answer. Is vir serve still running?");
  }
  const body = await reply.json().catch(() => ({}));
  if (!reply.ok) throw new Error(body.error || `The server answered ${reply.status}.`);
  return body;
}

const asking = (path, values) => ask(`${path}?${new URLSearchParams(values)}`);

async function doing(words, work) {
  $("busy").textContent = words;
  $("error").hidden = true;
  try {
    await work();
  } catch (error) {
    $("error").textContent = error.message;
    $("error").hidden = false;
    $("error").scrollIntoView({ block: "nearest" });
  } finally {
    $("busy").textContent = "";
  }
}

function options(select, values) {
  select.replaceChildren(...values.map(([value, words]) => new Option(words, value)));
}

function make(name, properties = {}, ...children) {
  const element = Object.assign(document.createElement(name), properties);
  element.append(...children);
  return element;
}

// A photograph

async function send(content, name) {
  await doing(`Looking at ${name} …`, async () => {
    if (content.size > model.limits.bytes) {
      throw new Error(`${name}: the file has ${content.size.toLocaleString("en")} bytes, expected at most ` +
        `${model.limits.bytes.toLocaleString("en")}. Make the photograph smaller.`);
    }
    const start = performance.now(), number = ++answers;
    let told;
    try {
      told = await ask(`answer?size=${model.size}`, { method: "POST", body: content });
    } catch (error) {
      throw new Error(`${name}: ${error.message}`);
    }
    const seconds = (performance.now() - start) / 1000;
    const image = await loaded(`photograph?image=${encodeURIComponent(told.image)}`);
    if (number !== answers) return;
    picture = image;
    $("size").value = $("form-size").value = String(model.size);
    $("costs").replaceChildren();
    $("scene").hidden = true; // it is of the photograph before
    query = null;
    called = name;
    tell(told, `answered in ${seconds.toFixed(2)} s`);
    for (const part of ["answer", "explore", "forms"]) $(part).hidden = false;
    await look();
    await findAnew();
  });
}

function loaded(address) {
  return new Promise((done, failed) => {
    const image = new Image();
    image.onload = () => done(image);
    image.onerror = () => failed(new Error("The server did not give the photograph back. Choose it again."));
    image.src = address;
  });
}

function tell(told, words) {
  shown = told;
  chooseKind(told.retention);
  $("bars").replaceChildren(...told.classes.map(({ name, probability }) => {
    const bar = make("i");
    bar.style.width = `${100 * probability}%`;
    return make("li", {}, make("span", { textContent: name }), make("div", {}, bar),
      make("b", { textContent: `${(100 * probability).toFixed(1)} %` }));
  }));
  $("answer-note").textContent = `${called} (${told.width} x ${told.height} px), ${words} at ${told.size} px with ` +
    `${told.retention.toUpperCase()} retention. The model knows these ${told.classes.length} kinds of things, and ` +
    " calls whatever it sees by one of their names.";
}

// The kind of retention: the weights serve both, but only one was trained

function chooseKind(kind) {
  for (const button of document.getElementsByName("retention")) button.checked = button.value === kind;
  const trained = model.retention.toUpperCase(), other = model.retention === "1d" ? "2D" : "1D";
  $("kind-note").textContent = kind === model.retention
    ? `The model was trained with ${trained}. Its weights serve ${other} as well, but it never learned to see so: ` +
      "its answer may differ."
    : `The model was trained with ${trained} and never learned to see with ${other}: with ${trained} its answer may ` +
      "differ from this one.";
}

async function answerAgain(size, retention) {
  const old = shown.grids[found.layer], number = ++answers;
  let told;
  try {
    told = await asking("answer", { image: shown.image, size, retention });
  } catch (error) {
    chooseKind(shown.retention); // as long as there is no other answer, this one holds
    $("size").value = String(shown.size);
    throw error;
  }
  if (number !== answers) return;
  tell(told, "answered");
  query = moved(query, old, shown.grids[Number($("layer").value)]);
  await look();
}

// What a patch retains

async function look() {
  const number = ++asked;
  const layer = Number($("layer").value);
  const where = query ? { row: query[0], col: query[1] } : {};
  const { image, size, retention } = shown;
  const told = await asking("retained", { image, layer, size, retention, ...where });
  if (number !== asked) return;
  found = told;
  query = told.query === "class" ? null : told.query;
  if (!query) $("class").hidden = false; // only then is there a class token
  heads();
  draw();
}

function heads() {
  const layer = model.layers[found.layer];
  const names = [["mean", "Mean of heads"], ...layer.gamma.map((gamma, i) => [String(i), `Head ${i}, γ = ${gamma.toFixed(3)}`])];
  const before = $("head").value;
  options($("head"), names);
  $("head").value = names.some(([value]) => value === before) ? before : "mean";
  $("heads").replaceChildren(...names.map(([value, words]) => {
    const canvas = make("canvas", { width: 160, height: Math.max(20, Math.round(160 * shown.fitted[1] / shown.fitted[0])) });
    paint(canvas, value, false);
    const button = make("button", { type: "button" }, canvas, words);
    button.setAttribute("aria-pressed", String(value === $("head").value));
    button.dataset.head = value;
    button.onclick = () => { $("head").value = value; draw(); };
    return button;
  }));
}

const weights = (head) => (head === "mean" ? found.mean : found.heads[Number(head)]);
const largest = (rows) => rows.flat(Infinity).reduce((most, value) => Math.max(most, Math.abs(value)), 0) || 1;
// One scale for all heads, so that they can be compared; a mean is far smaller and has its own.
const most = (head) => largest(head === "mean" ? found.mean : found.heads);

function colour(value) { // from -1 to 1
  const place = (Math.max(-1, Math.min(1, value)) + 1) / 2 * (model.colours.length - 1);
  const [r, g, b, a] = model.colours[Math.round(place)];
  return `rgba(${r}, ${g}, ${b}, ${a / 255})`;
}

function paint(canvas, head, framed) {
  const pen = canvas.getContext("2d");
  const { width, height } = canvas;
  const [rows, cols] = found.grid;
  pen.filter = "grayscale(1)";
  pen.drawImage(picture, 0, 0, width, height);
  pen.filter = "none";
  pen.fillStyle = "rgba(255, 255, 255, .25)";
  pen.fillRect(0, 0, width, height);
  const values = weights(head), scale = most(head);
  for (let row = 0; row < rows; row++) {
    for (let col = 0; col < cols; col++) { // whole pixels: no seams between patches
      const left = Math.round(col * width / cols), top = Math.round(row * height / rows);
      pen.fillStyle = colour(values[row][col] / scale);
      pen.fillRect(left, top, Math.round((col + 1) * width / cols) - left, Math.round((row + 1) * height / rows) - top);
    }
  }
  if (framed && $("grid").checked) lines(pen, width, height, rows, cols);
  if (framed) crop(pen, width, height);
  if (query) {
    pen.setLineDash([]);
    for (const [ink, wide] of [["#fff", 7], ["#1d2733", 3]]) { // seen on every colour of the map
      pen.lineWidth = framed ? wide : wide / 2;
      pen.strokeStyle = ink;
      pen.strokeRect(query[1] * width / cols, query[0] * height / rows, width / cols, height / rows);
    }
  }
}

function lines(pen, width, height, rows, cols) {
  pen.strokeStyle = "rgba(255, 255, 255, .55)";
  pen.lineWidth = 1;
  pen.beginPath();
  for (let row = 1; row < rows; row++) { pen.moveTo(0, row * height / rows); pen.lineTo(width, row * height / rows); }
  for (let col = 1; col < cols; col++) { pen.moveTo(col * width / cols, 0); pen.lineTo(col * width / cols, height); }
  pen.stroke();
}

function crop(pen, width, height) { // the middle square that the answer is made from
  const side = model.crop * Math.min(shown.width, shown.height);
  const w = side / shown.width * width, h = side / shown.height * height;
  pen.lineWidth = 2;
  for (const [ink, offset] of [["rgba(0, 0, 0, .6)", 0], ["#fff", 6]]) {
    pen.strokeStyle = ink;
    pen.setLineDash([6, 6]);
    pen.lineDashOffset = offset;
    pen.strokeRect((width - w) / 2, (height - h) / 2, w, h);
  }
  pen.setLineDash([]);
}

function draw() {
  const canvas = $("map"), head = $("head").value;
  canvas.width = 960;
  canvas.height = Math.round(960 * shown.fitted[1] / shown.fitted[0]);
  paint(canvas, head, true);
  for (const button of $("heads").children) button.setAttribute("aria-pressed", String(button.dataset.head === head));
  const layer = model.layers[found.layer], [rows, cols] = found.grid;
  const own = found.own && (head === "mean" ? found.own.reduce((a, b) => a + b) / found.own.length : found.own[Number(head)]);
  const who = query ? `The patch in row ${query[0]}, column ${query[1]}` : `The class token (${own.toPrecision(3)} from itself)`;
  const values = weights(head).flat(), best = values.reduce((at, value, i) => (Math.abs(value) > Math.abs(values[at]) ? i : at), 0);
  $("told").textContent = `${who} of ${rows} x ${cols} patches (layer ${layer.number}, ${layer.stride} px each, ` +
    `${found.retention.toUpperCase()} retention) retains most from row ${Math.floor(best / cols)}, column ${best % cols}: ` +
    `${values[best].toPrecision(3)}. Retention looks back: ` +
    (found.retention === "2d" ? "up and to the left." : "along this row and all rows above.");
  $("low").textContent = `−${most(head).toPrecision(2)}`;
  $("high").textContent = `+${most(head).toPrecision(2)}`;
}

function scale() {
  const pen = $("scale").getContext("2d");
  for (let x = 0; x < 165; x++) { pen.fillStyle = colour(x / 82 - 1); pen.fillRect(x, 0, 1, 10); }
}

function patchAt(event) {
  // The canvas may stand in a larger box (object-fit: contain): only the picture counts.
  const box = $("map").getBoundingClientRect(), [rows, cols] = found.grid;
  const zoom = Math.min(box.width / $("map").width, box.height / $("map").height);
  const width = $("map").width * zoom, height = $("map").height * zoom;
  const x = (event.clientX - box.left - (box.width - width) / 2) / width;
  const y = (event.clientY - box.top - (box.height - height) / 2) / height;
  return x < 0 || y < 0 || x >= 1 || y >= 1 ? null : [Math.floor(y * rows), Math.floor(x * cols)];
}

function lookFrom(place) {
  query = place;
  return doing("Looking …", look);
}

// In a new grid the same place of the photograph looks; its lower right part, which sees all of it.
function moved(place, [oldRows, oldCols], [rows, cols]) {
  return place && [Math.ceil((place[0] + 1) * rows / oldRows) - 1, Math.ceil((place[1] + 1) * cols / oldCols) - 1];
}

// Forms

async function compute() {
  $("run").disabled = true;
  const size = $("form-size").value, form = $("form").value;
  await doing(`Computing at ${size} px, ${form} …`, async () => {
    const cost = await asking("forms", { image: shown.image, form, size, retention: shown.retention });
    const cells = [cost.form, cost.retention.toUpperCase(), cost.size, `${cost.milliseconds.toFixed(0)} ms`,
      `${(cost.peak_bytes / 2 ** 20).toFixed(1)} MB`,
      cost.difference ? cost.difference.toExponential(1) : "0", `${cost.answer} ${(100 * cost.probability).toFixed(1)} %`];
    $("costs").append(make("tr", {}, ...cells.map((textContent) => make("td", { textContent }))));
  });
  $("run").disabled = false;
}

// Start

async function start() {
  model = await ask("model");
  $("about").textContent = `${model.model}, trained at ${model.size} px, ${model.layers.length} layers of ` +
    `${model.retention.toUpperCase()} retention, on this machine.`;
  $("limits").textContent = `at most ${model.limits.bytes / 1e6} MB and ${model.limits.pixels / 1e6} megapixels`;
  const sizes = model.sizes.map((size) => [size, `${size} px`]);
  options($("layer"), model.layers.map((layer) => [layer.number, `${layer.number} (patches of ${layer.stride} px)`]));
  options($("size"), sizes);
  options($("form-size"), sizes);
  options($("form"), model.forms.map((form) => [form, form]));
  $("layer").value = String(model.layers.length - 1);
  scale();
  tabs();
  $("examples").append(...model.examples.map((name) => {
    const address = `examples/${encodeURIComponent(name)}`;
    const button = make("button", { type: "button" }, make("img", { src: address, alt: "" }), make("span", { textContent: name }));
    button.onclick = async () => send(await (await fetch(address)).blob(), name);
    return button;
  }));

  $("file").onchange = () => {
    const [file] = $("file").files;
    if (file) send(file, file.name);
    $("file").value = ""; // the same file can be chosen again
  };
  for (const kind of ["dragover", "dragleave", "drop"]) {
    document.addEventListener(kind, (event) => {
      event.preventDefault(); // else the browser would leave the page for the file
      $("drop").classList.toggle("over", kind === "dragover");
      const file = kind === "drop" && event.dataTransfer.files[0];
      if (file) send(file, file.name);
    });
  }
  $("map").onclick = (event) => { const place = patchAt(event); if (place) lookFrom(place); };
  $("map").onkeydown = (event) => {
    const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!step) return;
    event.preventDefault();
    const [rows, cols] = found.grid, [row, col] = query || [rows - 1, cols - 1];
    lookFrom([Math.max(0, Math.min(rows - 1, row + step[0])), Math.max(0, Math.min(cols - 1, col + step[1]))]);
  };
  $("class").onclick = () => lookFrom(null);
  $("layer").onchange = () => lookFrom(moved(query, found.grid, shown.grids[Number($("layer").value)]));
  $("head").onchange = draw;
  $("grid").onchange = draw;
  $("size").onchange = () => doing("Looking …", async () => {
    await answerAgain($("size").value, shown.retention);
    $("form-size").value = String(shown.size);
  });
  for (const button of document.getElementsByName("retention")) {
    button.onchange = () => doing("Looking …", () => answerAgain(shown.size, button.value));
  }
  $("run").onclick = compute;
}

doing("", start);
