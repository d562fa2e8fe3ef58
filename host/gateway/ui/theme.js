// Sets the theme before the first paint, so that no page flashes in the wrong colours.
// It is a plain script, because modules run only after the document has been parsed.
(function () {
  var kept = null;
  try { kept = localStorage.getItem('skep-theme'); } catch (e) { /* Storage may be forbidden. */ }
  if (kept === 'light' || kept === 'dark') document.documentElement.dataset.theme = kept;
})();
