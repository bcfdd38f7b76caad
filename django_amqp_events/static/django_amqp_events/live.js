/* Keeps the live regions of a page up to date: fetches the page again and updates what changed.

   A region stays as it is while a person selects, types or has the focus in it. What is being read
   does not move. Without this script, or where a policy forbids to fetch, the page stays as it was
   loaded. */
"use strict";
{
    // Lists of django-unfold have scripts of their own, which would not notice the changes.
    const REGIONS = ".ae-page [data-live], html:not([x-bind]) #changelist [data-live], " +
        "html:not([x-bind]) #changelist-filter";
    const control = document.querySelector(".ae-live");

    const busy = (region) => {
        const [selection, focused] = [getSelection(), document.activeElement];
        return region.contains(focused) && focused.nodeName !== "SUMMARY" ||
            region.querySelector('input:checked, option:checked:not([value=""])') !== null ||
            !selection.isCollapsed && selection.containsNode(region, true);
    };

    /* Where both have the same shape, elements stay, with their listeners and scroll positions. */
    const update = (old, fresh) => {
        if (old.nodeType !== Node.ELEMENT_NODE) {
            if (old.data !== fresh.data) {
                old.data = fresh.data;
            }
            return;
        }
        // A person has opened or closed what is folded.
        const names = new Set([...old.getAttributeNames(), ...fresh.getAttributeNames()]);
        names.delete("open");
        for (const name of names) {
            if (!fresh.hasAttribute(name)) {
                old.removeAttribute(name);
            } else if (old.getAttribute(name) !== fresh.getAttribute(name)) {
                old.setAttribute(name, fresh.getAttribute(name));
            }
        }
        const [before, after] = [[...old.childNodes], [...fresh.childNodes]];
        if (before.length === after.length &&
            before.every((node, place) => node.nodeName === after[place].nodeName)) {
            before.forEach((node, place) => update(node, after[place]));
        } else {
            old.replaceChildren(...after);
        }
    };

    const links = () => [...document.querySelectorAll("#content a[href]")];
    const target = (link) => link.getAttribute("href");
    const height = (link) => link.getClientRects()[0]?.top ?? -1;  // -1: it is not shown

    /* Keeps the row under the pointer, or the first link in view, where it is. */
    const inPlace = (page, change) => {
        const lasting = new Set([...page.querySelectorAll("a[href]")].map(target));
        const found = links().filter((link) => lasting.has(target(link)));
        const read = found.find((link) => link.closest("tr")?.matches(":hover")) ??
            found.find((link) => height(link) >= 0);
        const [href, before] = read ? [target(read), height(read)] : [];
        change();
        const there = links().find((link) => target(link) === href);
        if (there) {
            scrollBy(0, height(there) - before);
        }
    };

    // Django's script handles the checkboxes that were there when the page was loaded; let it
    // handle those that are there now.
    const boxes = document.getElementsByClassName("action-select");
    const select = window.Actions;
    let table = document.getElementById("result_list");
    if (select) {
        boxes.forEach = Array.prototype.forEach;
        window.Actions = (_loaded, options) => select(boxes, options);
    }

    const start = () => {
        const clock = control.querySelector("time");
        const note = control.querySelector("span");
        const button = control.querySelector("button");
        // In the language of the page: "0 s ago".
        const words = clock.textContent;
        const milliseconds = () => 1000 * control.dataset.seconds;
        let updated = Date.now();
        let asked = updated;
        let took = 0;
        let fetching = false;
        let paused = false;

        const toggle = () => {
            paused = !paused;
            [button.textContent, button.dataset.other] = [button.dataset.other, button.textContent];
        };
        const refresh = async () => {
            const answer = await fetch(location.href, {headers: {"X-Live": "1"}, cache: "no-store"});
            if (answer.redirected) {
                // The person has been logged out, or what the page shows was deleted.
                toggle();
            }
            if (!answer.ok || answer.redirected) {
                return;
            }
            const page = new DOMParser().parseFromString(await answer.text(), "text/html");
            let withheld = false;
            inPlace(page, () => {
                for (const region of document.querySelectorAll(REGIONS)) {
                    const fresh = page.getElementById(region.id);
                    if (fresh && !region.isEqualNode(fresh)) {
                        if (busy(region)) {
                            withheld = true;
                        } else {
                            update(region, fresh);
                        }
                    }
                }
            });
            const now = document.getElementById("result_list");
            if (now && now !== table && boxes.length) {
                window.Actions?.(boxes);
            }
            table = now;
            note.hidden = !withheld;
            const next = page.querySelector(".ae-live time");
            if (!withheld) {
                updated = Date.now();
                if (!next) {
                    stop();
                } else {
                    clock.dateTime = next.dateTime;
                    clock.title = next.title;
                }
            }
        };
        const tick = async () => {
            clock.textContent = words.replace("0", Math.round((Date.now() - updated) / 1000));
            if (fetching || paused || document.hidden) {
                return;
            }
            // A slow page is not fetched more often than a busy server bears.
            if (Date.now() - asked < Math.max(milliseconds(), 20 * took)) {
                return;
            }
            fetching = true;
            asked = Date.now();
            try {
                await refresh();
            } catch {
                // The server or the network is down; the clock shows it.
            }
            fetching = false;
            took = Date.now() - asked;
        };
        const timer = setInterval(tick, 1000);
        const stop = () => {
            clearInterval(timer);
            control.remove();
            document.documentElement.classList.remove("ae-refreshing");
        };
        document.addEventListener("securitypolicyviolation", (violation) => {
            if (violation.effectiveDirective === "connect-src") {
                stop();
            }
        });
        document.addEventListener("visibilitychange", tick);
        button.addEventListener("click", toggle);
        control.hidden = false;
        document.documentElement.classList.add("ae-refreshing");
    };
    if (control && document.querySelector(REGIONS)) {
        start();
    }
}
