"use strict";
const $ = (id) => document.getElementById(id);
const { heads, labels, kinds, metrics, given, checkpoints } = JSON.parse($("page").textContent);
const T = labels.length;
const VIEWS = {
  weights: "How much of its attention a query gives to each key (Vaswani et al. 2017).",
  values: `Weights times the length of what each key moves, |v W|: a key that carries nothing gives nothing
    (Kobayashi et al. 2020).`,
  logits: `Weights, and direct logit attribution: the next tokens that the head's output alone makes likeliest, through
    the final norm and the unembedding (Elhage et al. 2021).`,
  why: `Weights, and how much each writer (embedding, head, MLP) adds to a key's score above the other keys, by what it
    wrote to the query and by what it wrote to the key. Each list alone sums to the total (Elhage et al. 2021).`,
};
const large = $("picture").firstElementChild;
let loaded;  // what is stored of the checkpoint that is shown
let sides;  // that, or what is stored of both models
let rows;  // how many of the largest amounts are shown in figures
let across;  // tokens along a side of the large picture; more than T if its last pixel reaches beyond the text
let alsoDraw;  // what a page that is served draws besides
const changes = new Map();  // head -> "zero", "mean" or "patch": what the page that is served puts in its output's place

// ---- What is shown. The address says it: #HEAD/TOKEN, and what is not as the page opens, of /who, the view and the
// checkpoint, as in #1.3/17/who/values/step-00000400. The last word of a checkpoint's name stands for it, or its whole
// name if others share that word.

const names = checkpoints.map((each) => each.name);
const lastWords = names.map((name) => name.split(" ").at(-1));
const places = (new Set(lastWords).size === names.length ? lastWords : names).map(encodeURIComponent);
const last = checkpoints.length - 1;
// Of two models: of each head its name, that of its match, how far they are apart, and how far the next best is.
const { pairs } = checkpoints[last];
const nameOf = (head) => (pairs ? pairs[head][state.checkpoint] : heads[head]);
const initial = pairs ? 0 : last;  // where the page opens
// The first head to look at is the best of the first kind. The first token, its clearest example, is found once loaded.
const ranks = checkpoints[initial].heads.map(({ kind: [name, score] }) => Object.keys(kinds).indexOf(name) - score / 2);
const best = ranks.indexOf(Math.min(...ranks));
// other: the token that the chosen one looks at, or is looked at by, in the view "why"; undefined: the first in order.
const opening = { checkpoint: initial, head: best, token: undefined, who: false, view: "weights", other: undefined };
const state = { ...opening };
const described = () => checkpoints[state.checkpoint];
let pointed = {};  // what the mouse points at: a token, or a cell [query, key] of the large picture

const stored = (checkpoint, name) => $(`${checkpoint}/${name}`);
// The view "why" says so where it is not known.
const has = (view, checkpoint = state.checkpoint) => ["weights", "why"].includes(view) || stored(checkpoint, view) !== null;
const inValues = () => state.view === "values";

function address() {
  const { head, token, who, view, checkpoint, other } = state;
  const rest = [who && "who", view !== "weights" && view, checkpoint !== initial && places[checkpoint], other?.toString()];
  return `#${[heads[head], token, ...rest.filter(Boolean)].join("/")}`;
}

// Reads an address; one that does not fit is as the page opens.
function stateOf(hash) {
  const [head, token, ...rest] = hash.slice(1).split("/");
  const found = { ...opening, head: heads.indexOf(head), token: /^\d+$/.test(token) ? Number(token) : -1 };
  for (const word of rest) {
    if (word === "who") found.who = true;
    else if (word in VIEWS) found.view = word;
    else if (found.view === "why" && word in labels) found.other = Number(word);
    else found.checkpoint = places.indexOf(word);
  }
  const fits = found.head >= 0 && found.token in labels && found.checkpoint >= 0 && has(found.view, found.checkpoint);
  return fits ? found : opening;
}

let writing;  // a browser refuses an address that changes many times a second
function writeAddress() {
  clearTimeout(writing);
  if (location.protocol === "about:") return;  // a frame in a notebook
  writing = setTimeout(() => history.replaceState(null, "", address()), 300);
}

// ---- What is stored: of a head its weights row by row in 65535ths.

// Returns undefined if there is nothing of this name.
async function decode(checkpoint, name, Numbers) {
  const text = stored(checkpoint, name)?.textContent;
  if (!text) return;
  const packed = atob(text);
  const bytes = new Uint8Array(packed.length);
  for (let i = 0; i < bytes.length; i++) bytes[i] = packed.charCodeAt(i);
  const plain = new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate")));
  return new Numbers(await plain.arrayBuffer());
}

async function load(number) {
  const [norms, tokens, logits, reasons, influence, ...triangles] = await Promise.all([
    decode(number, "values", Float32Array),  // head by head, T of each
    decode(number, "logit_tokens", Int32Array),
    decode(number, "logits", Float32Array),
    decode(number, "why", Int32Array),  // field by field, of each the same for head, token and key
    ...["influence", ...heads].map((name) => decode(number, name, Uint16Array)),
  ]);
  const found = { number, norms, tokens, logits, reasons, influence, triangles, largest: 0 };
  for (let head = 0; norms && head < heads.length; head++) {
    for (let row = 0, i = 0; row < T; row++) {
      for (let key = 0; key <= row; key++, i++) {
        found.largest = Math.max(found.largest, (triangles[head][i] / 65535) * norms[head * T + key]);
      }
    }
  }
  return found;
}

// The weight of a query and a key, of the chosen head or in another triangle.
const weight = (row, key, triangle = loaded.triangles[state.head]) => triangle[(row * (row + 1)) / 2 + key] / 65535;
const normOf = (key) => loaded.norms[state.head * T + key];
// What the view shows of a query and a key; 0 if the key is later.
const amount = (row, key) => (key > row ? 0 : weight(row, key) * (inValues() ? normOf(key) : 1));

// ---- Colours: one scale for every picture, even in the square root of the amount, because most are small.

const STOPS = [[45, 30, 92], [48, 78, 140], [32, 127, 143], [52, 171, 117], [160, 211, 72], [254, 236, 110]];
const SHADES = Uint32Array.from({ length: 65536 }, (_, value) => {
  const place = Math.sqrt(value / 65535) * (STOPS.length - 1);
  const stop = Math.min(Math.floor(place), STOPS.length - 2);
  const [r, g, b] = STOPS[stop].map((low, c) => Math.round(low + (STOPS[stop + 1][c] - low) * (place - stop)));
  return (255 << 24) | (b << 16) | (g << 8) | r;  // the bytes of an RGBA pixel, little-endian
});
const scaleEnd = () => (inValues() ? Math.max(...sides.map((side) => side.largest)) : 1);
const tint = (colour, percent) => `color-mix(in srgb, var(--${colour}) ${percent}%, transparent)`;

// Paints a head, a pixel for each cell, but no more than the screen has in this width. Where cells share a pixel, it
// shows the largest: a mean would hide sharp heads. Returns how many tokens a side of a pixel stands for.
function paint(canvas, head, width, side = loaded) {
  const triangle = side.triangles[head];
  const norms = inValues() && side.norms?.subarray(head * T);
  const step = Math.ceil(T / Math.max(1, Math.floor(width * devicePixelRatio)));
  const n = Math.ceil(T / step);
  const largest = new Float32Array(n * n).fill(-1);  // -1 stays blank: a query cannot see that key
  for (let row = 0, i = 0; row < T; row++) {
    for (let key = 0; key <= row; key++, i++) {
      const value = norms ? triangle[i] * norms[key] : triangle[i];
      const pixel = Math.floor(row / step) * n + Math.floor(key / step);
      if (value > largest[pixel]) largest[pixel] = value;
    }
  }
  canvas.width = canvas.height = n;
  const context = canvas.getContext("2d", { willReadFrequently: true });  // small, and kept from the GPU
  const image = context.createImageData(n, n);
  const end = scaleEnd() || 1;
  const pixels = new Uint32Array(image.data.buffer);
  largest.forEach((value, i) => (pixels[i] = value < 0 ? 0 : SHADES[Math.round(value / end)]));
  context.putImageData(image, 0, 0);
  return step;
}

const poolNote = (step) =>
  step > 1 ? `a point is the largest of ${step} × ${step} ${inValues() ? "values" : "weights"}` : "";

// ---- What a head is named for.

const kindOf = (head) => described().heads[head].kind;  // its name, the score, and that of an even head
const short = (score) => score.toFixed(2).replace(/^0/, "");
let example;  // the token at which the head does most clearly what it is named for

function tagOf(head) {
  const [name, score] = kindOf(head);
  return name in metrics ? `${metrics[name][0]} ${short(score)}` : "";
}

// Whether a query that looks at a key does what a head of this kind is named for.
function shows(kind, query, key) {
  const [, place, offset] = kinds[kind];
  const origin = key - offset;
  if (place === "query") return origin === query;
  return key < query && (place === "first" ? origin === 0 : place === "copy" && labels[origin] === labels[query]);
}

// The query with the largest weight of that kind, less that of an even head, which is large where there are few keys.
function findExample() {
  const [name] = kindOf(state.head);
  let most = 0;
  let found;
  for (let row = 1; row < T; row++) {
    for (let key = 0; key <= row; key++) {
      if (!shows(name, row, key)) continue;
      const excess = weight(row, key) - 1 / (row + 1);
      if (excess > most) [most, found] = [excess, row];
    }
  }
  return found;
}

// ---- Parts of the page. What they hold is text, elements, or lists of these.

// Makes an element, named as in a style sheet: "td.figure".
function make(name, ...content) {
  const [tag, ...classes] = name.split(".");
  const element = document.createElement(tag);
  element.classList.add(...classes);
  element.append(...content.flat(Infinity));
  return element;
}

// Makes an element of which a style is a share of the box around it.
function placed(name, style, share, ...content) {
  return Object.assign(make(name, content), { style: `${style}: ${100 * share}%` });
}

const clickable = (name, onclick, ...content) => Object.assign(make(name, ...content), { onclick });
const fill = (id, ...content) => $(id).replaceChildren(...content.flat(Infinity));
// Text in an element of its own: no token is read as markup, and right-to-left text ends with it.
const token = (i) => make("bdi", labels[i]);
const named = (i) => [token(i), ` (${i})`];
const endOf = (label) => make(label.endsWith("↵") ? "br" : "wbr");
const figure = (number) => (inValues() ? number.toPrecision(3) : number.toFixed(3));

const [tokens, influenced] = [["text", "button"], ["influence", "bdi"]].map(([id, tag]) => {
  const parts = labels.map((label, i) => clickable(`${tag}.token`, () => choose(i), label));
  fill(id, parts.map((part, i) => [part, endOf(labels[i])]));
  return parts;
});
// Names without a mark between them, as numbers are, stand apart.
const gap = labels.some((label) => /[␣↵]/.test(label)) ? "" : " ";
if (gap) document.body.classList.add("apart");

let group;  // the heads of a layer, which follow each other
const buttons = heads.map((name, i) => {
  const [layer] = name.split(".");
  if (group?.dataset.layer !== layer) {
    group = make("div.layer");
    group.dataset.layer = layer;
    $("heads").append(group);
  }
  // A press on a canvas reaches its button too.
  const canvas = pairs ? [0, 1].map((side) => clickable("canvas", () => show({ checkpoint: side }))) : make("canvas");
  const button = clickable("button", () => show({ head: i }), canvas, make("span"));
  button.ariaLabel = `head ${name}`;
  group.append(button);
  return button;
});

// ---- Drawing: everything, one head, or one token of it.

const both = pairs && [load(0), load(1)];

async function show(change) {
  if (["head", "token", "who"].some((name) => name in change)) state.other = undefined;
  const sameHead = ["checkpoint", "head", "view"].every((name) => !(name in change) || change[name] === state[name]);
  Object.assign(state, change);
  if (!has(state.view)) state.view = "weights";
  pointed = {};
  $("slider").value = state.checkpoint;
  if (loaded?.number !== state.checkpoint) {
    const all = await Promise.all(pairs ? both : [load(state.checkpoint)]);
    const found = all.find(({ number }) => number === state.checkpoint);
    if (!found) return;  // another one was chosen meanwhile
    [loaded, sides] = [found, all];
    drawHeads();
  } else if ("view" in change) drawHeads();
  if (!sameHead || !across) {
    example = findExample();
    drawHead();
  }
  state.token ??= example ?? T - 1;
  writeAddress();
  drawToken();
}

function drawHeads() {
  const { name, summary } = described();
  fill("checkpoint", last === 0 ? summary.slice(name.length + 3) : summary);  // the title has the name
  for (const input of $("views").querySelectorAll("input")) {
    input.checked = input.value === state.view;
    input.disabled = !has(input.value);
  }
  const missing = Object.keys(VIEWS).filter((view) => !has(view)).join(" and ");
  fill("meaning", VIEWS[state.view] + (missing && ` Unknown for this type of model: ${missing}.`));
  const width = buttons[0].firstChild.getBoundingClientRect().width;
  const steps = buttons.map((button, i) => {
    const tag = tagOf(i).replaceAll(" ", "\u00a0");  // a tag that does not fit is hidden whole
    const caption = pairs ? `${pairs[i][0]} | ${pairs[i][1]} ${pairs[i][2]}` : `${heads[i]} ${tag}`;
    button.lastChild.textContent = button.title = caption;
    return sides.map((side, place) => paint(button.children[place], i, width, side))[0];
  });
  const byLayer = heads.every((name, i) => i === 0 || parseInt(heads[i - 1]) <= parseInt(name));
  const count = heads.length === 1 ? "1 head" : `${heads.length} heads${byLayer ? ", by layer" : ""}`;
  fill("strip-note", [count, pairs && `left ${names[0]}, right ${names[1]}`, poolNote(steps[0])].filter(Boolean).join(" · "));
  const end = scaleEnd();
  const ticks = [0, 0.2, 0.4, 0.6, 0.8, 1];
  fill("ticks", ticks.map((place) => placed("span", "left", place, Number((place ** 2 * end).toPrecision(2)))));
}

function drawHead() {
  const { scores } = described().heads[state.head];
  const [kind, , even] = kindOf(state.head);
  const name = nameOf(state.head);
  const tag = tagOf(state.head);
  buttons.forEach((button, i) => (button.ariaPressed = i === state.head));
  keepInView($("heads"), buttons[state.head]);
  fill("head", `Head ${name}`);
  const replaced = changes.get(name);
  fill("kind", replaced ? `its output is not added (${replaced})` : `looks ${tag && "at "}${kinds[kind][0]}`);
  const isUnclear = example === undefined;
  $("clearest").hidden = !tag;
  $("clearest").disabled = isUnclear;
  fill("clearest", isUnclear ? "no example in this text" : `clearest for ${name}`);
  drawUpstream();
  fill("of-scores", `Scores of head ${name}${tag && `: ${tag} (${short(even)} if it attended evenly)`}`);
  const meaning = "if even: of a head that attends evenly to all it may see; A_ij: the weight of query i for key j";
  const titles = ["", "score", "if even", meaning].map((title) => make("th.quiet", title));
  const lines = Object.entries(metrics).filter(([metric]) => scores[metric][0]).map(([metric, [title, , meaning]]) => {
    const [score, even] = scores[metric];
    return make("tr", make("td", title), make("td", score), make("td.quiet", even), make("td.quiet", meaning));
  });
  fill("scores", make("tr", titles), lines);
  drawPlaces();
  drawLarge();
}

// The name of a head as a button that goes there; any other word as it is.
function linked(word) {
  const place = heads.findIndex((_, head) => nameOf(head) === word);
  return place < 0 ? word : clickable("button", () => show({ head: place }), word);
}

// The upstream heads, and the heads that this one is upstream of: each that is named is a button that goes there. Scores
// have no digit before the point, or two after it.
function drawUpstream() {
  if (pairs) {
    const [distance, next] = pairs[state.head].slice(2);
    const match = pairs[state.head][1 - state.checkpoint];
    return fill("upstream", `match ${match} differs by ${distance}, next best ${next}`);
  }
  const upstream = described().heads.map((head) => head.upstream);
  const needed = upstream[state.head] && `score ${upstream[state.head]}`;
  const others = heads.filter((_, i) => upstream[i].includes(` ${heads[state.head]} `)).join(", ");
  const words = [needed, others && `upstream of ${others}`].filter(Boolean).join("; ").split(/(\d+\.\d+)/);
  fill("upstream", words.map(linked));
}

// Draws the large picture, numbers its axes, and names their tokens where there is room.
function drawLarge() {
  const width = large.getBoundingClientRect().width;
  const step = paint(large, state.head, width);
  across = Math.ceil(T / step) * step;
  fill("pooled", poolNote(step));
  const withNames = $("looking").matches(".named");
  const pitch = width / T;
  const every = withNames ? 1 : [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000].find((count) => count * pitch > 34);
  $("large").style.setProperty("--size", `${withNames ? Math.min(12, 0.95 * pitch) : 11}px`);
  for (const [axis, side] of [["queries", "top"], ["keys", "left"]]) {
    fill(axis, labels.map((label, i) => {
      if (i % every) return [];
      return placed("span", side, (i + 0.5) / across, withNames ? [make("bdi", label), ` ${i}`] : i);
    }));
  }
}

function drawToken() {
  const [query, key] = pointed.cell ?? [];
  const { who, view } = state;
  const shown = pointed.token ?? (who ? key : query) ?? state.token;
  const verbs = inValues() ? ["takes from", "gives to"] : ["looks at", "is looked at by"];
  if (who) verbs.reverse();
  fill("sentence", named(shown), ` ${verbs[0]}`);
  fill("who", `⇄ ${verbs[1]}`);
  $("clearest").ariaPressed = state.token === example && !who;
  const amounts = labels.map((_, i) => (who ? amount(i, shown) : amount(shown, i)));
  const unseen = (i) => (who ? i < shown : i > shown);
  const largest = shade(tokens, amounts, "attention", shown, unseen, who ? query : key);
  tokens.forEach((part, i) => {
    part.tabIndex = i === state.token ? 0 : -1;
    part.ariaPressed = i === state.token;
  });
  if (pointed.token === undefined) keepInView($("text"), tokens[shown]);
  fill("shade", `this shade = ${figure(largest)}`);
  const percent = (count) => `${(100 * count) / across}%`;
  Object.assign($("outline").style, who
    ? { left: percent(shown), top: percent(shown), width: percent(1), height: percent(T - shown) }
    : { left: 0, top: percent(shown), width: percent(shown + 1), height: percent(1) });
  drawReadout(query, key);
  fill("most", TABLES[view]?.(shown) ?? mostTable(shown, amounts, unseen));
  drawPrediction(shown);
  alsoDraw?.(shown);
}

// Shades tokens by their amounts, and marks the one that is shown, another one, and those that are unseen. Returns the
// largest amount, which is shaded in full.
function shade(parts, amounts, colour, shown, unseen, other) {
  const largest = Math.max(...amounts);
  parts.forEach((part, i) => {
    const mark = i === shown ? "shown" : i === other ? "other" : unseen(i) ? "unseen" : "";
    const percent = ((100 * amounts[i]) / largest).toFixed(1);
    part.style.backgroundColor = amounts[i] > 0 ? tint(colour, percent) : "";
    part.className = `token ${mark}${i < given ? "" : " generated"}`.trim();
  });
  return largest;
}

function drawReadout(query, key) {
  if (query === undefined) return fill("readout");
  const influence = weight(query, key, loaded.influence);
  fill(
    "readout", "query ", named(query), "\nkey ", named(key), `\nweight ${weight(query, key).toFixed(5)}`,
    inValues() ? ` × length ${normOf(key).toPrecision(4)}\nvalue ${amount(query, key).toPrecision(4)}` : [],
    influence > 0 ? `\ninfluence ${influence.toFixed(5)}` : [],
  );
}

const whole = (label) => Object.assign(make("bdi.token", label), { title: label });

// The largest amounts, in figures, as many as there is room for. Those that round to 0 would crowd a short text.
function mostTable(shown, amounts, unseen) {
  const seen = [...labels.keys()].filter((i) => !unseen(i));
  const largest = seen.sort((a, b) => amounts[b] - amounts[a]).slice(0, rows);
  const order = largest.filter((i, place) => place === 0 || Number(figure(amounts[i])) > 0);
  const explained = reasonsOf(shown).map(({ other }) => other);
  return make("table", order.map((i) => {
    const bar = placed("span.bar", "width", amounts[i] / (amounts[order[0]] || 1));
    const label = whole(labels[i]);
    const name = explained.includes(i) ? clickable("button.go", () => show({ view: "why", other: i }), label) : label;
    const words = [make("td.figure.before", beside(i, -1)), make("td.name", name, beside(i, 1))];
    return make("tr", make("td.figure.quiet", i), words, make("td.figure", figure(amounts[i])), make("td", bar));
  }));
}

// ---- Why a token looks at another: stored for those to which it gives most.

// The reasons for what a token looks at, or is looked at by: the other token, the weight, the advantage of its score, and
// the parts of that, writer and size, for what was written to the query and to the key; scores in hundredths. The largest
// weight comes first.
function reasonsOf(shown) {
  const { reasons } = loaded;
  const { writers } = described();
  const count = reasons ? reasons.length / heads.length / T / 22 : 0;  // keys of a token
  const found = [];
  for (const query of state.who ? labels.keys() : [shown]) {
    if (query === 0) continue;  // it sees no other
    for (let n = 0; n < count; n++) {
      const field = (number) => reasons[((number * heads.length + state.head) * T + query) * count + n];
      const key = field(0);
      if (key > query || (state.who && key !== shown)) continue;
      const sides = [2, 12].map((first) => {
        const parts = [0, 1, 2, 3, 4].map((i) => [writers[field(first + i)], field(first + 5 + i)]);
        if (parts[4][1]) parts.push(["the rest", parts.reduce((rest, [, part]) => rest - part, field(1))]);
        return parts.filter(([, part]) => part);
      });
      found.push({ other: state.who ? query : key, weight: weight(query, key), advantage: field(1), sides });
    }
  }
  return found.sort((a, b) => b.weight - a.weight).slice(0, 5);
}

const signed = (number) => `${number < 0 ? "−" : "+"}${Math.abs(number).toFixed(2)}`;

// Below a text, a column of lines: name, amount, and perhaps a bar.
function column(title, lines) {
  const parts = lines.map(([name, amount, bar = []]) =>
    make("tr", make("td.name", name), make("td.figure", signed(amount)), make("td", bar)));
  return make("div", make("p.quiet", title), make("table", parts));
}

function whyTable(shown) {
  const found = reasonsOf(shown);
  const reason = found.find(({ other }) => other === state.other) ?? found[0];
  const { unexplained = "Nothing that is among the largest weights of a token." } = described();
  if (!reason) return make("p.quiet", unexplained);
  const largest = Math.max(...reason.sides.flat().map(([, part]) => Math.abs(part)));
  const others = found.map(({ other, weight }) => {
    const button = clickable("button.go", () => show({ other }), named(other), ` ${short(weight)}`);
    button.ariaPressed = other === reason.other;
    return button;
  });
  const columns = reason.sides.map((side, i) => {
    const lines = side.map(([name, part]) => {
      const bar = placed(part < 0 ? "span.bar.against" : "span.bar", "width", Math.abs(part) / largest);
      return [linked(name), part / 100, bar];
    });
    return column(`written to the ${i ? "key" : "query"} by`, lines);
  });
  const above = `score ${signed(reason.advantage / 100)} above the other keys`;
  return [make("p.row", others, make("span.quiet", above)), make("div.columns.why", columns)];
}

// The tokens before or after one, as many as fit ten letters.
function beside(i, step) {
  let text = "";
  for (let at = i + step; at in labels && text.length + labels[at].length <= 10; at += step) {
    text = step < 0 ? labels[at] + gap + text : text + gap + labels[at];
  }
  return make("bdi.quiet", text);
}

// What the head makes likeliest and unlikeliest after a token.
function logitsTable(shown) {
  const count = loaded.tokens.length / heads.length / T;  // first the likeliest, then as many unlikeliest
  const start = (at) => (state.head * T + at) * count;
  const isKnown = (at) => !isNaN(loaded.logits[start(at)]);
  if (!isKnown(shown)) {
    const distance = (at) => Math.abs(at - shown);
    const [next] = [...labels.keys()].filter(isKnown).sort((a, b) => distance(a) - distance(b));
    const unit = distance(next) === 1 ? "token" : "tokens";
    const where = `, ${distance(next)} ${unit} ${next > shown ? "later" : "earlier"}. `;
    const go = clickable("button.go", () => show({ token: next }), "go there");
    return make("p", "Not computed at this token. The nearest that was is ", named(next), where, go);
  }
  const linesFrom = (first) => Array.from({ length: count / 2 }, (_, i) => {
    const place = start(shown) + first + i;
    return [whole(described().token_names[loaded.tokens[place]]), loaded.logits[place]];
  });
  const makes = changes.has(heads[state.head]) ? "not added; would make" : "makes";
  const likeliest = column([`${makes} likeliest after `, named(shown)], linesFrom(0));
  return make("div.columns", likeliest, column(`${makes} unlikeliest (logits)`, linesFrom(count / 2)));
}

const TABLES = { logits: logitsTable, why: whyTable };

function drawPrediction(shown) {
  const [next, chance] = described().predictions[shown];
  fill("last", named(shown));
  fill("next", next);
  fill("chance", chance);
  const amounts = labels.map((_, i) => (i <= shown ? weight(shown, i, loaded.influence) : 0));
  const largest = shade(influenced, amounts, "influence", shown, (i) => i > shown);
  $("influence-shade").className = largest ? "shade" : "";
  fill("influence-shade", largest ? `this shade = ${largest.toFixed(3)}` : "Not computed for this token.");
  keepInView($("influence"), influenced[shown]);
}

// ---- Where the chosen head looks most in a long text: a line for each place, which opens to all that was read with it.

const NEAR = 8;  // tokens on both sides of query and key, in a line

async function drawPlaces() {
  const { checkpoint, head } = state;
  fill("of-places", pairs ? "Losses" : `Places of head ${heads[head]}`);
  if (!has("places", last)) return;  // the page says why
  const [texts, found] = JSON.parse(new TextDecoder().decode(await decode(last, "places", Uint8Array)));
  if (head !== state.head || checkpoint !== state.checkpoint) return;  // another one was chosen meanwhile
  const [note, groups] = found[head];
  const isShown = pairs || checkpoint === last;
  $("found").hidden = !isShown;
  const parts = pairs ? "the token that was read (framed) and the next one (filled)"
    : `the token that looks (framed), what it looks at (filled), and what that makes likelier`;
  fill("read", isShown ? `${note}. A line has ${parts}; it opens to its text.` : "Only the last checkpoint has places.");
  fill("found", groups.map(([title, places], i) => {
    const lines = places.map((place) => drawPlace(texts[place[1]], ...place));
    const group = make("details.group", make("summary", title), lines);
    group.open = pairs || i < groups.length - 1;
    return group;
  }));
}

function drawPlace(text, amount, start, query, key, likeliest) {
  const word = (i) => make(`bdi.token${i === query ? ".shown" : ""}${i === key ? ".key" : ""}`, text[i]);
  const distance = (i) => Math.min(Math.abs(i - query), Math.abs(i - key));
  const isGap = (i) => i > key && i === query - NEAR - 1;
  const line = make("span.text", text.map((_, i) => (distance(i) <= NEAR ? word(i) : isGap(i) ? " … " : [])));
  const whole = make("div.text");
  const figures = [make("span", amount.toFixed(2)), make("span", (start + query).toLocaleString("en"))];
  const tokens = make("span.likeliest", likeliest.map((label) => [make("bdi.token", label), " "]));
  const details = make("details.place", make("summary", figures, line, tokens), whole);
  details.ontoggle = () => {
    if (!details.open || whole.firstChild) return;
    whole.append(...text.flatMap((label, i) => [word(i), endOf(label)]));
    if (labels.every((label, i) => label === text[i]) && query < T) {
      const go = () => show({ token: query, who: false }).then(() => $("reading").scrollIntoView());
      whole.prepend(clickable("button.go", go, "see it above"), make("br"));
    }
    keepInView(whole, whole.querySelector(".shown"));
  };
  return details;
}

// Scrolls a box, never the page, until a part of it is seen.
function keepInView(box, part) {
  const top = part.offsetTop;
  if (top >= box.scrollTop && top + part.offsetHeight <= box.scrollTop + box.clientHeight) return;
  const line = parseFloat(getComputedStyle(box).lineHeight);
  box.scrollTop = top - 1 - line * Math.floor(box.clientHeight / line / 2);  // whole lines
}

// ---- Room: the largest tiles and letters with which everything is seen without scrolling.

// Calls set with the largest size, from least to most, with which a box shows all that it holds.
function enlarge(box, least, most, set) {
  let low = least;
  for (let high = most; low < high;) {
    const middle = Math.ceil((low + high) / 2);
    set(middle);
    if (box.scrollHeight <= box.clientHeight) low = middle;
    else high = middle - 1;
  }
  set(low);
}

function fit() {
  const strip = $("heads");
  const isNarrow = matchMedia("(max-width: 60rem)").matches;
  const least = isNarrow ? 30 : 20;  // for a finger no smaller than 30
  $("looking").classList.add("named");  // if letters of nine pixels fit
  $("looking").classList.toggle("named", large.getBoundingClientRect().width / T > 9.5);
  const resizeHeads = (size) => {
    strip.style.setProperty("--tile", `${size}px`);
    strip.classList.toggle("captions", size >= 64);
  };
  strip.classList.remove("many");
  enlarge(strip, least, isNarrow ? 80 : 132, resizeHeads);
  if (!strip.matches(".captions")) {  // they have the room that a high window has left
    strip.classList.add("many");
    enlarge(strip, least, 64, resizeHeads);
  }
  enlarge($("text"), isNarrow ? 15 : 12, isNarrow ? 15 : 32, (size) => ($("text").style.fontSize = `${size}px`));
  fill("most");  // its own height
  const room = $("most").clientHeight - 10;
  rows = Math.max(5, Math.min(T, Math.floor(room / 20)));
  $("most").style.setProperty("--row", `${Math.min(52, Math.floor(room / rows))}px`);
}

function resize() {
  fit();
  drawHeads();
  drawLarge();
  drawToken();
}

// ---- What a person does.

const choose = (i) => show(i === state.token ? { who: !state.who } : { token: i });
const point = (change) => {
  pointed = change;
  drawToken();
};

// The cell under the pointer; of a pool the largest.
function cellAt(event) {
  const box = large.getBoundingClientRect();
  const step = across / large.width;
  const place = (offset) => Math.floor((offset / box.width) * large.width) * step;
  const top = place(event.clientY - box.top);
  const left = place(event.clientX - box.left);
  let found;
  for (let row = top; row < Math.min(T, top + step); row++) {
    for (let key = left; key <= Math.min(row, left + step - 1); key++) {
      if (!found || amount(row, key) > amount(...found)) found = [row, key];
    }
  }
  return found;
}

const within = (list, i) => Math.max(0, Math.min(list.length - 1, i));
const KEYS = {
  ArrowLeft: () => show({ token: within(labels, state.token - 1) }),
  ArrowRight: () => show({ token: within(labels, state.token + 1) }),
  Home: () => show({ token: 0 }),
  End: () => show({ token: T - 1 }),
  ArrowUp: () => show({ head: within(heads, state.head - 1) }),
  ArrowDown: () => show({ head: within(heads, state.head + 1) }),
  Enter: () => show({ who: !state.who }),
  c: () => example !== undefined && show({ token: example, who: false }),
};
KEYS[" "] = KEYS.Enter;
Object.keys(VIEWS).forEach((view, i) => (KEYS[i + 1] = () => has(view) && show({ view })));

function press(event) {
  const { target, key } = event;
  if (!KEYS[key] || event.ctrlKey || event.altKey || event.metaKey) return;
  if (target.type === "range" && !/\d/.test(key)) return;  // its own
  if (target.type === "radio" && /Left|Right/.test(key)) return;
  const pressesAnother = target.matches?.("button, summary") && target !== buttons[state.head];
  if (KEYS[key] === KEYS.Enter && pressesAnother) return;
  event.preventDefault();
  KEYS[key]();
  if (target.parentNode === $("text")) tokens[state.token].focus({ preventScroll: true });
}

function listen() {
  document.onkeydown = press;
  $("slider").oninput = () => show({ checkpoint: Number($("slider").value) });
  $("views").onchange = (event) => show({ view: event.target.value });
  $("views").onclick = (event) => event.detail && document.activeElement.blur();  // the arrows are for tokens again
  $("before").onclick = KEYS.ArrowLeft;
  $("after").onclick = KEYS.ArrowRight;
  $("who").onclick = KEYS.Enter;
  $("clearest").onclick = KEYS.c;
  tokens.forEach((part, i) => {
    part.onpointerenter = (event) => event.pointerType === "mouse" && point({ token: i });
  });
  $("text").onpointerleave = () => point({});
  large.onpointermove = (event) => point({ cell: cellAt(event) });
  large.onpointerleave = (event) => event.pointerType === "mouse" && point({});
  large.onclick = async (event) => {
    const cell = pointed.cell ?? cellAt(event);
    if (!cell) return;
    await show({ token: cell[state.who ? 1 : 0] });
    point({ cell });
  };
  onhashchange = () => show(stateOf(location.hash));
  onresize = resize;
}

$("scale").style.background = `linear-gradient(to right, ${STOPS.map((stop) => `rgb(${stop})`)})`;
if (pairs) $("heads").classList.add("pairs");
$("looking").classList.toggle("upstream", pairs || checkpoints.some((checkpoint) => checkpoint.heads.some((head) => head.upstream)));
fit();
// A frame that is still written to keeps the page loading until it is drawn: so that a screenshot is never blank.
const frame = make("iframe");
frame.hidden = true;
document.body.append(frame);
frame.contentDocument?.open();
show(stateOf(location.hash)).then(listen).finally(() => frame.remove());

/* ---- Live: only a page that is served has what follows. What is asked stands in the address before the #, as
   ?text=...&other=...&zero=0.1 1.2&mean=...&patch=... */

const asked = new URLSearchParams(location.search);
const form = $("asked");
const ways = [...form.querySelectorAll("[type=button]")];  // in which a head can be changed
for (const { name } of ways) for (const head of asked.get(name)?.match(/\S+/g) ?? []) changes.set(head, name);

// Returns what a page says of a text. Throws the sentence that says why it cannot be read.
async function fetchPage(query) {
  const response = await fetch(`?${query}`).catch(() => {
    throw Error("nobody answers: start it again by inspect_attention.py ... --live, and open the address that it prints");
  });
  const text = await response.text();
  if (!response.ok) throw Error(new DOMParser().parseFromString(text, "text/html").body.textContent);
  return JSON.parse(text.match(/ id="page">(.*?)<\/script>/s)[1]);
}

// Goes to the page of what is in the form. It is fetched before, so that what cannot be read is said here. Meanwhile the
// form takes nothing more.
async function ask(changed = changes) {
  const query = new URLSearchParams(new FormData(form));
  if (!asked.has("text") && query.get("text") === form.elements.text.defaultValue) query.delete("text");
  for (const [head, way] of changed) query.set(way, [query.get(way), head].filter(Boolean).join(" "));
  for (const [name, value] of [...query]) if (!value) query.delete(name);
  const focused = document.activeElement;
  fill("problem", "reading ...");
  form.inert = true;
  try {
    const found = await fetchPage(query);
    fill("problem");
    state.token = within(found.labels, state.token);
    sessionStorage.pressed = [...form.elements].indexOf(focused);
    location.assign(`?${query}${address()}`);
  } catch (error) {
    fill("problem", error.message);
  } finally {
    form.inert = false;
    focused.focus();
  }
}

// Changes a head in this way, or no longer.
function change(head, way) {
  const others = [...changes].filter(([name]) => name !== head);
  ask(changes.get(head) === way ? others : [...others, [head, way]]);
}

// The predictions after each token side by side: as the model is, with heads changed, and on the other text.
function drawPredicted() {
  const { columns } = checkpoints[0];
  const titles = columns.map(([name, , predictions]) => {
    const losses = predictions.slice(0, -1).map(([, , loss]) => loss);  // none after the last
    const mean = losses.reduce((sum, loss) => sum + loss, 0) / losses.length;
    const own = name === "other" ? make("th.name", "after") : [];
    const key = name === "changed" ? " (pink worse, green better)" : "";
    return [own, make("th", `next, ${name}${key}`), make("th.figure", `loss ${mean.toFixed(3)}`)];
  });
  const length = Math.max(...columns.map(([, words]) => words.length));
  const lines = Array.from({ length }, (_, i) => {
    const cells = columns.map(([name, words, predictions]) => {
      const [next, chance, loss] = predictions[i] ?? ["", "", null];
      const figure = make("td.figure", loss?.toFixed(2) ?? "");
      if (name === "changed" && loss !== null) {  // red for a loss that rose by a nat
        const rise = loss - columns[0][2][i][2];
        const percent = Math.min(100, 100 * Math.abs(rise));
        figure.style.backgroundColor = tint(rise > 0 ? "influence" : "attention", percent);
      }
      const own = name === "other" ? make("td.name", make("bdi", words[i] ?? "")) : [];
      return [own, make("td", make("bdi", next), ` ${chance}`), figure];
    });
    const first = make("td.name", i < T ? token(i) : []);
    return clickable("tr", () => i < T && show({ token: i }), first, cells);
  });
  const head = make("thead", make("tr", make("th", "after"), titles));
  fill("predicted", make("table", head, make("tbody", lines)));
  drawLive(state.token);
}

function drawLive(shown) {
  const name = heads[state.head];
  fill("chosen", name);
  for (const button of ways) {
    button.ariaPressed = changes.get(name) === button.name;
    button.disabled = button.name === "patch" && !form.elements.other.value;
  }
  const lines = [...$("predicted").querySelectorAll("tbody tr")];
  lines.forEach((line, i) => (line.ariaCurrent = i === shown));
  if (pointed.token === undefined && lines[shown]) {
    $("predicted").scrollTop = lines[shown].offsetTop - $("predicted").clientHeight / 2;
  }
}

onpageshow = () => {  // also of a page that one comes back to
  for (const field of form.querySelectorAll("textarea")) field.value = asked.get(field.name) ?? field.defaultValue;
  drawPredicted();
  // The focus stays on what was pressed on the page before, or on what stands before that.
  const isNext = (field, i) => i <= sessionStorage.pressed && !field.disabled;
  [...form.elements].findLast(isNext)?.focus({ preventScroll: true });
};
form.onsubmit = (event) => {
  event.preventDefault();
  ask();
};
form.onkeydown = (event) => {
  if (!event.target.matches("textarea")) return;
  event.stopPropagation();  // other keys are for the text
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) form.onsubmit(event);
};
addEventListener("click", () => fill("problem"), true);  // before what the click asks for
form.oninput = () => drawLive(state.token);
for (const button of ways) button.onclick = () => change(heads[state.head], button.name);
fill("changes", [...changes].map(([head, way]) => {
  const button = clickable("button.go", () => change(head, way), `${head} ${way}`);
  button.type = "button";
  return button;
}));
buttons.forEach((button, i) => button.classList.toggle("changed", changes.has(heads[i])));
alsoDraw = drawLive;
