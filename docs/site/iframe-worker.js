/* Search for pages that are opened as files: browsers start no workers there, so the worker runs in a hidden frame. */
(() => {
  if (location.protocol !== "file:") return;
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);
      const inside = this.frame.contentWindow;
      inside.document.open();
      inside.document.write(
        "<script>postMessage = message => parent.dispatchEvent(new MessageEvent('message', {data: message, source: window}));"
        + "importScripts = (...urls) => urls.reduce((before, url) => before.then(() => new Promise((done, failed) => {"
        + "const script = document.createElement('script'); script.src = url; script.onload = done; script.onerror = failed;"
        + "document.head.append(script); })), Promise.resolve());</" + "script>"
        + `<script src="${url}"></` + "script>"
      );
      this.ready = new Promise(done => { this.frame.onload = done; });
      inside.document.close();
      window.addEventListener("message", event => {
        if (event.source !== this.frame.contentWindow) return;
        const copy = new MessageEvent("message", {data: event.data});
        this.dispatchEvent(copy);
        if (this.onmessage) this.onmessage(copy);
      });
    }
    postMessage(data) {
      this.ready.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", {data})));
    }
    terminate() { this.frame.remove(); }
  };
})();
