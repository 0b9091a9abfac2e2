// The theme makes buttons and frames of code and tables after the page is loaded. Whoever has no mouse must reach
// what scrolls, and each frame of buttons has a name of its own.
const mend = () => {
  for (const one of document.querySelectorAll(".md-typeset__scrollwrap, .md-typeset pre > code")) one.tabIndex = 0
  document.querySelectorAll("nav.md-code__nav").forEach((one, place) => { one.ariaLabel = `Code ${place + 1}` })
}
new MutationObserver(mend).observe(document.documentElement, { childList: true, subtree: true })
mend()
