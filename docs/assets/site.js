// On a narrow screen the cells of a table stand below each other (site.css): each then says which column it is of.
function labelCells() {
  for (const table of document.querySelectorAll(".md-typeset table:not([class])")) {
    const titles = [...table.querySelectorAll("thead th")].map((title) => title.textContent.trim());
    for (const row of table.querySelectorAll("tbody tr")) {
      [...row.cells].forEach((cell, n) => {
        if (n > 0 && titles.length > 2 && titles[n]) cell.dataset.label = titles[n];
      });
    }
  }
}

// document$ announces each page that instant navigation shows
if (window.document$) window.document$.subscribe(labelCells);
else labelCells();
