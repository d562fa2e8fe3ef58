// Sets the theme before the first paint, so that no page flashes in the wrong colors: as the person chose, otherwise as the system says.
// It is a plain script, because modules run only after the document has been parsed.
(function () {
  var root = document.documentElement;
  var kept = null;
  try { kept = localStorage.getItem('skep-theme'); } catch (e) { /* Storage may be forbidden. */ }
  if (kept === 'light' || kept === 'dark') root.dataset.choice = kept;
  root.dataset.theme = root.dataset.choice || (matchMedia('(prefers-color-scheme: dark)').matches ? 'dark' : 'light');
})();
