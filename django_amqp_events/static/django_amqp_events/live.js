/* Refreshes the parts of a page that have no controls (data-live), and says when another part
   (data-watch) has changed: what a click does does not change under the pointer.

   A part is not replaced while it has the focus, a selection, an open table or the pointer on a
   link. Without this script, the page stays as it was loaded. */
"use strict";
{
    const control = document.querySelector(".ae-live");
    const changed = document.querySelector(".ae-changed");
    const button = control.querySelector("button");
    const parts = [...document.querySelectorAll("[data-live], [data-watch]")];
    let asked = Date.now();
    let took = 0;
    let busy = false;
    let paused = false;

    /* The text of a part, with times instead of ages, which change each minute. */
    const content = (part) => {
        const copy = part.cloneNode(true);
        for (const age of copy.querySelectorAll(".ae-age")) {
            age.textContent = age.dateTime;
        }
        return copy.textContent;
    };
    const isRead = (part) => {
        const selection = getSelection();
        return part.contains(document.activeElement) ||
            part.querySelector("details[open], a:hover") !== null ||
            !selection.isCollapsed && selection.containsNode(part, true);
    };
    const update = (part, fresh) => {
        if (fresh && content(part) === content(fresh)) {
            const ages = fresh.querySelectorAll(".ae-age");
            part.querySelectorAll(".ae-age").forEach((age, place) => {
                age.textContent = ages[place].textContent;
            });
        } else if (fresh && "live" in part.dataset && !isRead(part)) {
            part.replaceChildren(...fresh.childNodes);
        } else {
            changed.hidden = false;
        }
    };
    const refresh = async () => {
        const answer = await fetch(location.href, {headers: {"X-Live": "1"}, cache: "no-store"});
        if (!answer.ok) {
            return;
        }
        const page = new DOMParser().parseFromString(await answer.text(), "text/html");
        parts.forEach((part) => update(part, page.getElementById(part.id)));
        const next = page.querySelector(".ae-live time");
        if (next) {
            control.querySelector("time").textContent = next.textContent;
        } else {
            // Nothing is going on any more, or the user has been logged out.
            clearInterval(timer);
            control.hidden = true;
        }
    };
    const timer = setInterval(async () => {
        // A slow page is not fetched more often than a busy server bears.
        const pause = Math.max(1000 * control.dataset.seconds, 20 * took);
        if (busy || paused || document.hidden || Date.now() - asked < pause) {
            return;
        }
        busy = true;
        asked = Date.now();
        try {
            await refresh();
        } catch {
            // The server or the network is down: the time of the last update stays.
        }
        busy = false;
        took = Date.now() - asked;
    }, 1000);

    button.addEventListener("click", () => {
        paused = !paused;
        [button.textContent, button.dataset.other] = [button.dataset.other, button.textContent];
    });
    control.hidden = !parts.some((part) => "live" in part.dataset);
}
