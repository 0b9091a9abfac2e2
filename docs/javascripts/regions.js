// The theme makes buttons and frames of code and tables after the page is loaded. Whoever has no mouse must reach
// what scrolls, and a frame of buttons is no place of the page.
const mend = () => {
  for (const one of document.querySelectorAll(".md-typeset__scrollwrap, .md-typeset pre > code")) one.tabIndex = 0
  for (const one of document.querySelectorAll("nav.md-code__nav")) one.setAttribute("role", "group")
}
new MutationObserver(mend).observe(document.documentElement, { childList: true, subtree: true })
mend()
