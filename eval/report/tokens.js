"use strict";
// Walks the rounds of a text. Words of a model become text nodes, never markup.
document.documentElement.classList.add("js");

const el = (tag, kind, text) => {
  const made = document.createElement(tag);
  made.className = kind;
  made.textContent = text;
  return made;
};
const visible = (text) => text.replaceAll("\n", "\u23ce").replaceAll("\t", "\u21e5").replaceAll(" ", "\u00b7") || "\u2026";
const milliseconds = (value) => `${value < 10 ? value.toFixed(1) : Math.round(value)} ms`;
const endings = {
  correction: "in place of the refused draft",
  bonus: "behind a draft that passed whole",
  first: "of the prompt alone",
};

const kinds = {
  correction: "the verifier's correction",
  bonus: "the verifier's bonus",
  first: "the verifier's first token",
};

const said = (round, whole) => {
  if (round.kind === "first") return "the prompt gives the first token";
  const passed = round.path.length;
  if (!whole) return `${passed} accepted, then the verifier's own token`;
  const drafts = `${passed} of ${round.drafts.length} accepted`;
  return round.drafts.length ? `${drafts}, then ${round.kind === "bonus" ? "a bonus" : "a correction"}` : "no drafts";
};

const chips = (round, whole) => {
  const rows = [];
  const accepted = new Set(round.path);
  const end = round.path.length ? round.path[round.path.length - 1] : -1;
  const levels = Math.max(0, ...round.depths);
  for (let depth = 1; depth <= levels; depth += 1) {
    const row = el("div", "row", "");
    row.append(el("span", "lab", `draft ${depth}`));
    round.drafts.forEach((draft, n) => {
      if (round.depths[n] !== depth) return;
      const refused = round.parents[n] === end && round.kind === "correction";
      const kind = accepted.has(n) ? `d${Math.min(depth, 5)}` : refused ? "no" : "untried";
      const chip = el("span", `chip ${kind}`, visible(draft));
      const after = round.parents[n] < 0 ? "" : ` after ${visible(round.drafts[round.parents[n]])}`;
      chip.title = `${accepted.has(n) ? "accepted" : refused ? "refused" : "not on the accepted path"}${after}`;
      row.append(chip);
      if (accepted.has(n)) row.append(el("span", "mark", "\u2713 accepted"));
      else if (refused && round.depths.filter((one) => one === depth).length === 1) {
        row.append(el("span", "mark", "\u2717 refused"));
      }
    });
    rows.push(row);
  }
  const row = el("div", "row", "");
  row.append(el("span", "lab", "verifier"), el("span", `chip t ${round.kind}`, visible(round.own)));
  row.append(el("span", "mark", whole || round.kind === "first" ? endings[round.kind] : ""));
  rows.push(row);
  if (round.kept <= round.path.length) rows.push(el("div", "mark", "The text ends inside this round."));
  return rows;
};

const walk = (box) => {
  const { rounds, whole } = JSON.parse(box.querySelector("script").textContent);
  const text = box.querySelector(".text");
  const tokens = [...text.children];
  const slider = box.querySelector("input");
  const told = box.querySelector("output");
  const rows = box.querySelector(".rows");
  const hint = box.querySelector(".hint");
  const play = box.querySelector("[data-play]");
  const last = rounds.length - 1;
  let timer = 0;
  let current = -1;

  const show = (wanted) => {
    const at = Math.min(last, Math.max(0, wanted));
    const round = rounds[at];
    slider.value = at;
    for (const token of tokens) {
      const turn = Number(token.dataset.r);
      token.classList.toggle("later", turn > at);
      token.classList.toggle("now", turn === at);
    }
    const times = round.ms
      ? `draft ${milliseconds(round.ms[0])}, verify ${milliseconds(round.ms[1])}, all ${milliseconds(round.ms[2])}`
      : "";
    told.replaceChildren(...[`Round ${at} of ${last}`, said(round, whole), times].map((line) => el("span", "soft", line)));
    slider.setAttribute("aria-valuetext", `round ${at} of ${last}, ${said(round, whole)}`);
    rows.replaceChildren(...chips(round, whole));
    rows.scrollTop = 0;
  };
  const stop = () => {
    clearTimeout(timer);
    timer = 0;
    play.textContent = "Play";
  };
  const step = () => {
    const at = Number(slider.value);
    if (at >= last) return stop();
    show(at + 1);
    const ms = rounds[at + 1].ms;
    timer = setTimeout(step, ms ? Math.min(1500, Math.max(40, ms[2])) : 150);
  };
  const point = (n) => {
    const token = tokens[n];
    if (!token) return;
    const depth = Number(token.dataset.d);
    const round = rounds[token.dataset.r];
    const own = whole || round.kind === "first" ? kinds[round.kind] : "the verifier's own";
    const who = depth ? `draft of depth ${depth}, accepted` : own;
    hint.textContent = `Token ${n + 1} of ${tokens.length}, ${visible(token.textContent)}: ${who}, round ${token.dataset.r}`;
  };
  const choose = (n) => {
    if (current >= 0) tokens[current].classList.remove("cur");
    current = n;
    if (n >= 0) tokens[n].classList.add("cur");
    point(n);
  };

  slider.addEventListener("input", () => { stop(); show(Number(slider.value)); });
  for (const button of box.querySelectorAll("[data-go]")) {
    button.addEventListener("click", () => { stop(); show(Number(slider.value) + Number(button.dataset.go)); });
  }
  play.addEventListener("click", () => {
    if (timer) return stop();
    play.textContent = "Stop";
    if (Number(slider.value) >= last) show(0);
    timer = setTimeout(step, 150);
  });
  text.addEventListener("pointerover", (event) => point(tokens.indexOf(event.target)));
  text.addEventListener("click", (event) => {
    const token = event.target.closest(".t");
    if (token) { stop(); show(Number(token.dataset.r)); point(tokens.indexOf(token)); }
  });
  text.addEventListener("focus", () => { if (current < 0 && text.matches(":focus-visible")) choose(0); });
  text.addEventListener("blur", () => choose(-1));
  text.addEventListener("keydown", (event) => {
    const moves = { ArrowLeft: current - 1, ArrowRight: current + 1, Home: 0, End: tokens.length - 1 };
    if (event.key in moves) {
      event.preventDefault();
      choose(Math.min(tokens.length - 1, Math.max(0, moves[event.key])));
    } else if (event.key === "Enter" && current >= 0) {
      stop();
      show(Number(tokens[current].dataset.r));
    }
  });
  show(last);
};

document.addEventListener("DOMContentLoaded", () => {
  for (const texts of document.querySelectorAll(".texts")) {
    const boxes = [...texts.querySelectorAll(".sample")];
    const buttons = [...texts.querySelectorAll("[data-pick]")];
    boxes.forEach(walk);
    buttons.forEach((button, n) => button.addEventListener("click", () => {
      boxes.forEach((box, at) => box.classList.toggle("more", at !== n));
      buttons.forEach((one, at) => one.setAttribute("aria-pressed", String(at === n)));
    }));
  }
});
