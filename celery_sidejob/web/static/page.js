// Times in the reader's zone, ids that a click copies, pages that follow changes. Every page is complete without it.
"use strict";
const zoned = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "medium" });
const clock = new Intl.DateTimeFormat(undefined, { timeStyle: "short" });
const main = document.querySelector("main");

function dress(part) {
  for (const time of part.querySelectorAll("time")) {
    const at = new Date(time.dateTime);
    if (/^\d{4}-/.test(time.textContent)) time.textContent = zoned.format(at);
    if (time.className === "clock") time.textContent = clock.format(at);
    time.title = `${zoned.format(at)} (${time.title})`;
  }
  for (const code of part.querySelectorAll("code.copy")) {
    const button = document.createElement("button");
    button.type = "button";
    button.className = "quiet";
    button.textContent = "Copy";
    button.addEventListener("click", async () => {
      await navigator.clipboard.writeText(code.textContent);
      button.textContent = "Copied";
    });
    code.after(" ", button);
  }
  reach();
}

// Whatever scrolls can be scrolled by the keyboard.
function reach() {
  for (const each of main.querySelectorAll(".scroll, pre")) {
    const scrolls = each.scrollWidth > each.clientWidth || each.scrollHeight > each.clientHeight;
    if (scrolls) each.tabIndex = 0; else each.removeAttribute("tabindex");
  }
}
main.addEventListener("toggle", reach, true);
addEventListener("resize", reach);
dress(main);

// An action on many goes on by itself; leaving the page stops it.
const goesOn = document.querySelector("form.goes-on");
if (goesOn) setTimeout(() => goesOn.requestSubmit(), 300);

// How long ago something was goes on, also where nothing else changes.
const units = [["d", 86400], ["h", 3600], ["min", 60]];
function lasting(seconds) {
  const [unit, length] = units.find(([, length]) => seconds >= 2 * length) || [];
  return unit ? `${Math.round(seconds / length)} ${unit}` : `${seconds.toFixed(1)} s`;
}
setInterval(() => {
  if (document.hidden) return;
  for (const time of main.querySelectorAll("time.ago")) {
    const away = (Date.now() - new Date(time.dateTime)) / 1000;
    time.textContent = away >= 1 ? `${lasting(away)} ago` : away <= -1 ? `in ${lasting(-away)}` : "now";
  }
}, 5000);

// An open page is asked for again when it has changed, but not under a reader's hands, and not while it is hidden.
if (main.dataset.live) {
  const sign = document.createElement("p");
  sign.className = "sign";
  sign.setAttribute("role", "status");
  main.after(sign);
  const say = (text) => { if (sign.textContent !== text) sign.textContent = text; };
  const sleep = (ms) => new Promise((done) => setTimeout(done, ms));
  const isUsed = () =>
    main.querySelector("details[name][open], .acts details[open]") || main.contains(document.getSelection().anchorNode) &&
    !document.getSelection().isCollapsed || document.activeElement.matches("main :is(input, select, textarea)");

  // What a reader has opened, scrolled and focused stays so.
  function replace(page) {
    const foldable = () => [...main.querySelectorAll("details")];
    const opened = foldable().map((each) => each.open);
    const wide = () => [...main.querySelectorAll(".scroll")];
    const scrolled = wide().map((each) => each.scrollLeft);
    const href = main.contains(document.activeElement) && document.activeElement.getAttribute("href");
    const alike = () => [...main.querySelectorAll("[href]")].filter((each) => each.getAttribute("href") === href);
    const focused = alike().indexOf(document.activeElement);
    main.dataset.live = page.dataset.live;
    main.replaceChildren(...page.childNodes);
    dress(main);
    foldable().forEach((each, place) => { if (place in opened) each.open = opened[place]; });
    wide().forEach((each, place) => { each.scrollLeft = scrolled[place] || 0; });
    if (href) alike()[focused]?.focus();
  }

  const LOST = "Not live: the connection is lost. Trying again.";
  let source = null, renewing = false, again = false;
  async function renew() {
    again = true;
    if (renewing) return;
    renewing = true;
    while (again && !document.hidden) {
      again = false;
      while (isUsed()) { say("Waits while you use it"); await sleep(500); }
      let answer, text;
      try {
        answer = await fetch(location.href, { headers: { "x-renews": "1" } });
        text = await answer.text();
      } catch {
        say(LOST);
        again = true;
        await sleep(3000);
        continue;
      }
      if (!answer.ok || answer.redirected) {
        say("Not live: load the page again.");
        break;
      }
      const page = new DOMParser().parseFromString(text, "text/html").querySelector("main");
      if (isUsed()) { again = true; continue; }
      replace(page);
      if (source.readyState === EventSource.OPEN) say("Live");
      await sleep(1000);
    }
    renewing = false;
  }
  function open() {
    source = new EventSource(main.dataset.live);
    source.addEventListener("listening", () => say("Live"));
    source.addEventListener("changed", renew);
    source.addEventListener("trouble", () => say("Not live: the store does not answer."));
    source.onerror = () => {
      say(LOST);
      if (source.readyState === EventSource.CLOSED) { const lost = source; setTimeout(() => { if (source === lost) open(); }, 10000); }
    };
  }
  document.addEventListener("visibilitychange", () => {
    source.close();
    if (document.hidden) say("Paused"); else open();
  });
  open();
}
