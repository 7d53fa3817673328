// Sorts a table by the column whose title is clicked: numbers by data-key, other cells by text; empty cells last.
"use strict";
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0];
  const heads = [...table.tHead.rows[0].cells];
  const keyOf = (row, column) => {
    const cell = row.cells[column];
    if (cell.dataset.key !== undefined) return cell.dataset.key === "" ? null : Number(cell.dataset.key);
    const text = cell.textContent.trim();
    return text === "-" ? null : text;
  };
  const compare = (a, b) =>
    typeof a === "number" ? a - b : a.localeCompare(b, "en", { numeric: true, sensitivity: "base" });
  heads.forEach((head, column) => {
    head.querySelector("button").addEventListener("click", () => {
      const numeric = body.querySelector(`tr > :nth-child(${column + 1})[data-key]`) !== null;
      const before = head.getAttribute("aria-sort");
      const descending = before === "none" ? numeric : before === "ascending"; // the largest figures first
      heads.forEach((other) => other.setAttribute("aria-sort", "none"));
      head.setAttribute("aria-sort", descending ? "descending" : "ascending");
      const rows = [...body.rows].map((row) => ({ row, key: keyOf(row, column) }));
      rows.sort((a, b) => {
        if (a.key === null || b.key === null) return (a.key === null) - (b.key === null);
        return descending ? compare(b.key, a.key) : compare(a.key, b.key);
      });
      body.append(...rows.map((entry) => entry.row));
    });
  });
}
