"use strict";
for (const button of document.querySelectorAll("th button")) {
  button.addEventListener("click", () => {
    const head = button.parentElement;
    const place = [...head.parentElement.children].indexOf(head);
    const up = head.getAttribute("aria-sort") !== "ascending";
    for (const other of head.parentElement.children) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", up ? "ascending" : "descending");
    const body = head.closest("table").tBodies[0];
    const key = (row) => row.children[place].dataset.v ?? row.children[place].textContent;
    const rows = [...body.rows].sort((a, b) => {
      const [x, y] = [key(a), key(b)];
      const order = x !== "" && y !== "" && !isNaN(x) && !isNaN(y) ? x - y : x.localeCompare(y);
      return up ? order : -order;
    });
    body.append(...rows);
  });
}
