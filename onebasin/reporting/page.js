(() => {
  "use strict";
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];

  // Sorting: numbers by value, words by alphabet, what is missing always last.
  const key = (cell, numeric) =>
    numeric ? (cell.dataset.value === undefined ? null : Number(cell.dataset.value))
            : (cell.querySelector(".missing") ? null : cell.textContent.trim());
  const sort = (head, table) => {
    const place = head.cellIndex;
    const numeric = head.classList.contains("number");
    const before = head.getAttribute("aria-sort");
    const falling = before === null ? numeric : before === "ascending"; // numbers start with the largest
    const sign = falling ? -1 : 1;
    const rows = all("tbody tr", table).filter((row) => row.cells.length > place);
    const keyed = rows.map((row) => [key(row.cells[place], numeric), row]);
    keyed.sort(([a], [b]) => {
      if (a === null || b === null) return (a === null) - (b === null);
      return sign * (numeric ? a - b : a.localeCompare(b, "en", { numeric: true }));
    });
    all("thead th", table).forEach((other) => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", falling ? "descending" : "ascending");
    keyed.forEach(([, row]) => table.tBodies[0].append(row));
  };
  all("button.sort").forEach((button) => {
    button.addEventListener("click", () => sort(button.closest("th"), button.closest("table")));
  });

  // What a column means: shown beside its head, for the mouse and for the keyboard.
  const tip = document.createElement("div");
  tip.className = "tip";
  tip.id = "tip";
  tip.setAttribute("role", "tooltip");
  tip.hidden = true;
  document.body.append(tip);
  const hide = () => { tip.hidden = true; };
  all("button.sort[title]").forEach((button) => {
    const text = button.title;
    button.removeAttribute("title");
    button.setAttribute("aria-describedby", "tip");
    const show = () => {
      tip.textContent = text;
      tip.hidden = false;
      const box = button.getBoundingClientRect();
      const left = Math.min(box.left, document.documentElement.clientWidth - tip.offsetWidth - 8);
      tip.style.left = `${Math.max(8, left)}px`;
      tip.style.top = `${box.top - tip.offsetHeight - 6 > 0 ? box.top - tip.offsetHeight - 6 : box.bottom + 6}px`;
    };
    button.addEventListener("mouseenter", show);
    button.addEventListener("focus", show);
    button.addEventListener("mouseleave", hide);
    button.addEventListener("blur", hide);
  });
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") hide(); });
  document.addEventListener("scroll", hide, true);

  // Tables wider than the page: said below them, and shaded at the side that hides something.
  const widths = () => all(".scroll").forEach((box) => {
    box.classList.toggle("overflowing", box.scrollWidth > box.clientWidth + 1);
    box.classList.toggle("at-end", box.scrollLeft + box.clientWidth >= box.scrollWidth - 1);
  });
  all(".scroll").forEach((box) => box.addEventListener("scroll", widths));
  addEventListener("resize", widths);
  widths();

  // Long tables: the first rows, and a button for the others.
  const most = 30;
  all("figure.table").forEach((part) => {
    const rows = all("tbody tr", part);
    if (rows.length <= most + 5) return;
    part.classList.add("folded");
    const button = document.createElement("button");
    button.type = "button";
    button.className = "more";
    button.textContent = `Show all ${rows.length} rows`;
    button.addEventListener("click", () => { part.classList.remove("folded"); button.remove(); });
    part.querySelector(".scroll").after(button);
  });

  // Copying a command.
  all("button.copy").forEach((button) => {
    button.addEventListener("click", () => {
      const code = button.parentElement.querySelector("code");
      const done = (word) => {
        button.textContent = word;
        setTimeout(() => { button.textContent = "Copy"; }, 1500);
      };
      const select = () => {
        getSelection().selectAllChildren(code);
        done("Selected");
      };
      if (navigator.clipboard) navigator.clipboard.writeText(code.textContent).then(() => done("Copied"), select);
      else select();
    });
  });

  // Light, dark, or as the system has it; remembered where the browser allows it.
  const themes = ["auto", "light", "dark"];
  const theme = document.querySelector("button.theme");
  const remembered = () => { try { return localStorage.getItem("onebasin-theme"); } catch { return null; } };
  const remember = (name) => { try { localStorage.setItem("onebasin-theme", name); } catch { /* private window */ } };
  const put = (name) => {
    document.documentElement.dataset.theme = name;
    theme.textContent = `Theme: ${name}`;
  };
  put(themes.includes(remembered()) ? remembered() : "auto");
  theme.addEventListener("click", () => {
    put(themes[(themes.indexOf(document.documentElement.dataset.theme) + 1) % themes.length]);
    remember(document.documentElement.dataset.theme);
  });

  // Where the reader is.
  const links = new Map(all("nav.contents li a").map((link) => [link.getAttribute("href").slice(1), link]));
  const seen = new Set();
  const mark = () => {
    const first = [...links.keys()].find((name) => seen.has(name));
    links.forEach((link, name) => {
      if (name === first) link.setAttribute("aria-current", "true");
      else link.removeAttribute("aria-current");
    });
  };
  const watcher = new IntersectionObserver((entries) => {
    entries.forEach(({ target, isIntersecting }) => seen[isIntersecting ? "add" : "delete"](target.id));
    mark();
  }, { rootMargin: "-10% 0px -60% 0px" });
  links.forEach((link, name) => {
    const target = document.getElementById(name);
    if (target) watcher.observe(target);
  });
})();
