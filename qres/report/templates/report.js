(() => {
  "use strict";

  // Sorting: by the cell's number where it has one, else by its text; cells without a value stay last.
  const compare = (a, b) =>
    a.key !== null && b.key !== null ? a.key - b.key : a.text.localeCompare(b.text, "en", { numeric: true });

  const sortBy = (header) => {
    const row = header.parentElement;
    const body = row.closest("table").tBodies[0];
    const column = [...row.children].indexOf(header);
    const direction = header.getAttribute("aria-sort") === "ascending" ? -1 : 1;
    const read = (line) => {
      const cell = line.children[column];
      const key = cell.dataset.key === undefined ? null : Number(cell.dataset.key);
      return { line, key, text: cell.textContent, empty: header.dataset.kind === "number" && key === null };
    };
    const lines = [...body.rows].map(read);
    lines.sort((a, b) => a.empty - b.empty || direction * compare(a, b));
    body.append(...lines.map((item) => item.line));
    for (const other of row.children) other.setAttribute("aria-sort", "none");
    header.setAttribute("aria-sort", direction === 1 ? "ascending" : "descending");
  };

  for (const button of document.querySelectorAll("thead button")) {
    button.addEventListener("click", () => sortBy(button.parentElement));
  }

  // Charts: drawn with the theme of the page, and drawn again, with the same choices, when the theme changes.
  const { charts, themes } = JSON.parse(document.getElementById("data").textContent);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const drawn = new Map();

  const draw = async (box) => {
    const name = box.dataset.chart;
    const theme = dark.matches ? "dark" : "light";
    const { view } = await vegaEmbed(box, structuredClone(charts[name]), {
      mode: "vega-lite",
      renderer: "svg",
      actions: false,
      config: themes[theme],
      tooltip: { theme },
    });
    const before = drawn.get(name);
    for (const { name: choice } of charts[name].params ?? []) {
      if (before) view.signal(choice, before.signal(choice));
    }
    await view.resize().runAsync(); // again: how many rows a legend needs is known only once the width is
    before?.finalize();
    drawn.set(name, view);
  };

  const drawAll = async () => {
    for (const box of document.querySelectorAll("[data-chart]")) await draw(box);
    document.documentElement.dataset.drawn = dark.matches ? "dark" : "light";
  };
  addEventListener("resize", () => drawn.forEach((view) => view.resize().runAsync()));
  dark.addEventListener("change", drawAll);
  drawAll();
})();
