// A button on every block of code that copies it. Blocks with output (text, pycon) have none.
"use strict";

function addCopyButton(code) {
  const button = document.createElement("button");
  button.className = "copy";
  button.type = "button";
  button.textContent = "Copy";
  button.setAttribute("aria-label", "Copy this code");
  const show = (word) => {
    button.textContent = word;
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  };
  button.addEventListener("click", () => {
    navigator.clipboard.writeText(code.textContent).then(() => show("Copied"), () => show("Not allowed"));
  });
  code.parentElement.append(button);
}

document.addEventListener("DOMContentLoaded", () => {
  if (!navigator.clipboard) return; // browsers give it to https:, file: and localhost only
  document.querySelectorAll("article div[class*='highlight-']:not(.highlight-text):not(.highlight-pycon) pre").forEach(addCopyButton);
});
