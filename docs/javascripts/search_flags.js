// Search takes a hyphen before a word for "without this word". Here it begins a flag, and a slash divides the name of a metric.
addEventListener("DOMContentLoaded", () => {
  const field = document.querySelector(".md-search__input");
  const { get, set } = Object.getOwnPropertyDescriptor(HTMLInputElement.prototype, "value");
  const plain = (typed) => typed.replace(/(^|\s)-+/g, "$1").replace(/\w+\/(?=\w)/g, "");
  Object.defineProperty(field, "value", { get() { return plain(get.call(this)); }, set });
});
