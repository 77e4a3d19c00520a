// Click a header to sort by its column: numbers as numbers, "-" always last. A second click reverses the order.
document.querySelectorAll("table.sortable").forEach((table) => {
  const heads = [...table.tHead.rows[0].cells];
  const units = { B: 1e-6, kB: 1e-3 };  // a column of MB has these where a value is small
  const number = (text) => parseFloat(text) * (units[(text.match(/^[-\d.]+ (k?B)\b/) || [])[1]] || 1);
  const value = (row, column) => row.cells[column].textContent.trim();
  heads.forEach((head, column) => head.querySelector("button").addEventListener("click", () => {
    const up = head.getAttribute("aria-sort") !== "ascending";
    heads.forEach((each) => each.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", up ? "ascending" : "descending");
    const order = (a, b) => {
      const [x, y] = [value(a, column), value(b, column)];
      if (x === "-" || y === "-") return (x === "-") - (y === "-");
      const [p, q] = [number(x), number(y)];
      const less = isNaN(p) || isNaN(q) ? x.localeCompare(y, "en", { numeric: true }) : p - q;
      return up ? less : -less;
    };
    const body = table.tBodies[0];
    body.append(...[...body.rows].sort(order));
  }));
});
addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((each) => { each.open = true; }));
