"use strict";
// Reading charts with keyboard, mouse and finger; and, while served live, taking up what is new.
(() => {
  function prepare(figure) {
    const plot = figure.querySelector(".plot");
    const svg = plot.querySelector("svg");
    const cursor = svg.querySelector(".cursor");
    const [hair, ...dots] = cursor.children;
    const reading = figure.querySelector(".reading");
    const points = JSON.parse(figure.querySelector(".points").textContent);
    const last = points.x.length - 1;
    let at = last;

    function show(index) {
      at = Math.min(last, Math.max(0, index));
      hair.setAttribute("transform", `translate(${points.x[at]} 0)`);
      dots.forEach((dot, n) => {
        const y = points.y[at][n];
        dot.setAttribute("visibility", y === null ? "hidden" : "inherit");
        dot.setAttribute("cx", points.x[at]);
        dot.setAttribute("cy", y === null ? 0 : y);
      });
      cursor.setAttribute("visibility", "visible");
      reading.textContent = points.say[at];
      plot.setAttribute("aria-valuenow", at + 1);
      plot.setAttribute("aria-valuetext", points.say[at]);
    }

    const steps = { ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1, PageUp: 10, PageDown: -10 };
    plot.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.altKey || event.metaKey) return;
      if (event.key in steps) show(at + steps[event.key]);
      else if (event.key === "Home") show(0);
      else if (event.key === "End") show(last);
      else return;
      event.preventDefault();
    });
    plot.addEventListener("focus", () => show(at));
    plot.addEventListener("blur", () => cursor.setAttribute("visibility", "hidden"));
    plot.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect();
      const x = ((event.clientX - box.left) / box.width) * svg.viewBox.baseVal.width;
      let best = 0;
      points.x.forEach((place, n) => {
        if (Math.abs(place - x) < Math.abs(points.x[best] - x)) best = n;
      });
      show(best);
    });
    plot.addEventListener("pointerleave", () => {
      if (document.activeElement !== plot) cursor.setAttribute("visibility", "hidden");
    });
  }

  document.querySelectorAll("figure.chart").forEach(prepare);

  const live = document.body.dataset.live;
  if (!live) return;
  const link = document.getElementById("link");

  function replace(section, html, stamp) {
    const open = [...section.querySelectorAll("details[open]")].map((each) => each.id);
    const focused = section.contains(document.activeElement) ? document.activeElement.id : "";
    section.innerHTML = html;
    section.dataset.stamp = stamp;
    open.forEach((id) => { const found = document.getElementById(id); if (found) found.open = true; });
    section.querySelectorAll("figure.chart").forEach(prepare);
    if (focused) document.getElementById(focused)?.focus({ preventScroll: true });
  }

  let version = "";
  async function look() {
    try {
      const answer = await fetch(`${live}?since=${encodeURIComponent(version)}`, { cache: "no-store" });
      if (!answer.ok) throw new Error(answer.status);
      const news = await answer.json();
      version = news.version;
      for (const [id, part] of Object.entries(news.sections || {})) {
        const section = document.getElementById(id);
        if (section && section.dataset.stamp !== part.stamp) replace(section, part.html, part.stamp);
      }
      if (news.made) document.getElementById("made").textContent = news.made;
      link.textContent = "It renews itself.";
    } catch {
      link.textContent = "The server does not answer any more; this is what was known last.";
    }
    setTimeout(look, 2000);
  }
  look();
})();
