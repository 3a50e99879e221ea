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

// A wide picture is small on a narrow screen: it is a link to itself, which shows it in full size.
function linkPictures() {
  for (const image of document.querySelectorAll('.md-typeset img[src*="pictures/"]')) {
    if (image.closest("a")) continue;
    const link = document.createElement("a");
    link.href = image.src.split("#")[0];
    link.title = "full size";
    image.replaceWith(link);
    link.append(image);
  }
}

function preparePage() {
  labelCells();
  linkPictures();
}

// document$ announces each page that instant navigation shows
if (window.document$) window.document$.subscribe(preparePage);
else preparePage();
