// Click a header to sort by its column: numbers as numbers, "-" always last. A second click reverses the order.
document.querySelectorAll("table.sortable").forEach((table) => {
  const heads = [...table.tHead.rows[0].cells];
  const value = (row, column) => row.cells[column].textContent.trim();
  heads.forEach((head, column) => head.querySelector("button").addEventListener("click", () => {
    const up = head.getAttribute("aria-sort") !== "ascending";
    heads.forEach((each) => each.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", up ? "ascending" : "descending");
    const order = (a, b) => {
      const [x, y] = [value(a, column), value(b, column)];
      if (x === "-" || y === "-") return (x === "-") - (y === "-");
      const [p, q] = [parseFloat(x), parseFloat(y)];
      const less = isNaN(p) || isNaN(q) ? x.localeCompare(y, "en", { numeric: true }) : p - q;
      return up ? less : -less;
    };
    const body = table.tBodies[0];
    body.append(...[...body.rows].sort(order));
  }));
});
addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((each) => { each.open = true; }));
