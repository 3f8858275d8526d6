// One migration as it happens, by its events.

import { follow, say } from "./asking.js";
import { Curve, element, Facts, MemoryMap, section, setText } from "./drawing.js";
import { report, STILL } from "./report.js";
import * as words from "./words.js";

const PAGE = 4096;

/** How far the memory is, or a disk. */
function bar(name) {
  const label = element("span");
  const gauge = element("progress", { max: 1, value: 0 });
  const box = element("label", { class: "gauge" }, label, gauge);
  return {
    box,
    update(done, total, more) {
      box.hidden = total === 0;
      gauge.value = total === 0 ? 0 : Math.min(done / total, 1);
      setText(label, `${name}: ${words.bytes(done)} of ${words.bytes(total)}${more}`);
    },
  };
}

/** What it said beforehand that it would be like; nothing without goals. */
function promised(promise) {
  if (!promise) {
    return null;
  }
  const { pause_ms: usual, pause_up_to_ms: most, time_ms: time } = promise;
  const upTo = most && words.time(most) !== words.time(usual) ? ` (up to ${words.time(most)})` : "";
  return `pause ${words.time(usual)}${upTo}, ${words.time(time)} in all`;
}

function facts(now) {
  const faults = now.faults;
  const atWork = !words.hasEnded(now);
  return [
    ["Time", words.time(now.elapsed_ms)],
    ["Left", now.eta_ms === null ? null : words.time(now.eta_ms)],
    ["Round", now.round || null],
    ["Pages to cross", atWork && now.bytes_total ? words.count(Math.max(now.bytes_total - now.bytes_done, 0) / PAGE) : null],
    ["Rate", atWork ? words.rate(now.rate_bytes_per_s) : null],
    ["Guest writes", !atWork || now.dirty_pages_per_s === 0 ? null : `${words.count(now.dirty_pages_per_s)} pages/s (${words.rate(now.dirty_pages_per_s * PAGE)})`],
    ["Sent", words.bytes(now.bytes_sent)],
    ["Faults", faults ? `${words.count(faults.count)}, ${words.count(faults.fetched)} fetched a page` : null],
    ["Fault latency", faults?.fetched ? `median ${words.micros(faults.p50_us)}, 99 % within ${words.micros(faults.p99_us)}, longest ${words.micros(faults.max_us)}` : null],
    ["Mode", now.mode],
    ["Fabric", now.fabric],
    ["Began", words.date(now.began_at)],
    ["Promised", promised(now.promise)],
    ["Group", now.group],
    ["Id", now.id],
  ];
}

/** What goes wrong, a line each. */
function troubles(now) {
  const lacks = (now.missing_devices ?? []).map((device) => `The guest lacks ${device.role}: ${device.why}. On ${device.node}: ${device.mend}`);
  const at = now.outcome;
  const blockers = (at.blockers ?? []).map((blocker) => blocker.message);
  return [now.warning, now.unwritten, at.error, ...blockers, ...lacks].filter(Boolean);
}

/** How long the guest's requests to a disk take at present; nothing if it makes none. */
function requests(io) {
  const told = ["reads", "writes"].filter((kind) => io?.[kind]).map((kind) => `${kind} ${words.micros(io[kind].mean_ms * 1000)}`);
  return told.length === 0 ? "" : `, the guest's ${told.join(", ")}`;
}

/** Bars, one for each disk. */
class Disks {
  constructor() {
    this.element = element("div");
    this.bars = new Map();
  }

  update(disks) {
    for (const disk of disks) {
      if (!this.bars.has(disk.name)) {
        this.bars.set(disk.name, bar(`Disk ${disk.name}`));
        this.element.append(this.bars.get(disk.name).box);
      }
      this.bars.get(disk.name).update(disk.bytes_done, disk.bytes_total, (disk.in_step ? ", in step" : `, ${words.rate(disk.rate_bytes_per_s)}`) + requests(disk.io));
    }
  }
}

/** Maps, one for each RAM block. They stay when the migration has ended. */
class Maps {
  constructor() {
    this.note = element("p", { class: "none" }, "There is a map only while memory arrives.");
    this.blocks = element("div", { class: "maps" });
    this.element = element("div", {}, this.note, this.blocks);
    this.maps = new Map();
  }

  update(now) {
    const place = now.role === "source" ? "is there" : "is here";
    // The map counts a page that has crossed, also if the guest has written to it since.
    const again = now.phase === "rounds" && now.round > 1 ? ", some of it as it was before the guest wrote to it again" : "";
    for (const block of now.arrived ?? []) {
      if (!this.maps.has(block.block)) {
        this.maps.set(block.block, new MemoryMap(block.block, words.bytes(block.bytes)));
        this.blocks.append(this.maps.get(block.block).element);
      }
      this.maps.get(block.block).update(block.parts, place + again);
    }
    // All of it, or it would not be done.
    if (now.outcome.state === "done") this.maps.forEach((map) => map.fill(place));
    this.note.hidden = this.maps.size > 0;
  }
}

/** Faults in each second, from what was counted before. */
class FaultRate {
  constructor() {
    this.curve = new Curve("Page faults", (perSecond) => `${words.count(perSecond)} a second`, words.time);
    this.last = null;
  }

  update({ elapsed_ms: ms, faults }) {
    if (!faults) return;
    const last = this.last ?? { ms, count: faults.count };
    // Closer together, one fault more or less would be a peak.
    if (this.last && ms - last.ms < 200) return;
    this.last = { ms, count: faults.count };
    if (ms > last.ms) this.curve.add(ms, ((faults.count - last.count) / (ms - last.ms)) * 1000);
  }
}

/** When the guest stood still, from and to, in milliseconds since the request; null if it has not, or nobody has measured it. */
function pause({ phases = [], phase, elapsed_ms: now, outcome: { state, report } }) {
  // Nobody knows whether the guest runs at the peer.
  if (state === "reconnecting") return null;
  const still = (report?.phases ?? phases).filter(({ name }) => STILL.includes(name));
  if (report && !(report.downtime_ms > 0)) return null;
  const end = STILL.includes(phase) ? now : still.length === 0 ? null : still.at(-1).start_ms + still.at(-1).duration_ms;
  if (end === null) return null;
  // The phases have what comes before the stop, too.
  // One that is not over is in no list: it began when the one before ended.
  const over = phases.at(-1);
  const begun = still[0]?.start_ms ?? (over ? over.start_ms + over.duration_ms : end);
  const from = report ? end - report.downtime_ms : begun;
  return { from: Math.max(from, 0), to: end };
}

class View {
  constructor(page) {
    this.title = element("h1");
    this.state = element("p", { class: "state" });
    this.memory = bar("Memory");
    this.troubles = element("ul", { class: "troubles" });
    [this.facts, this.disks, this.maps, this.faults] = [new Facts(), new Disks(), new Maps(), new FaultRate()];
    this.rate = new Curve("Memory that arrives", words.rate, words.time);
    this.writes = new Curve("Memory that the guest writes", words.rate, words.time);
    this.end = element("div", { class: "report" });
    page.append(element("p", {}, element("a", { href: "#/" }, "All of the node")), this.title, this.state, this.memory.box,
      this.disks.element, this.troubles, this.end, section("Now", this.facts.element),
      section("Map of memory", this.maps.element),
      section("Over time", this.rate.element, this.writes.element, this.faults.curve.element));
  }

  update(now) {
    setText(this.title, `${now.vm} ${words.peer(now)}`);
    const state = words.outcome(now);
    if (this.state.textContent !== state) {
      this.state.textContent = state;
      say(`${now.vm}: ${state}`);
    }
    // Once it has ended, the report has the bytes.
    this.memory.update(now.bytes_done, words.hasEnded(now) ? 0 : now.bytes_total, "");
    this.disks.update(now.disks ?? []);
    const lines = troubles(now);
    if (this.troubles.textContent !== lines.join("")) this.troubles.replaceChildren(...lines.map((line) => element("li", {}, line)));
    this.facts.update(facts(now));
    if (!words.hasEnded(now)) {
      this.rate.add(now.elapsed_ms, now.rate_bytes_per_s);
      // Not known before the first scan, and at the destination.
      if (now.dirty_pages_per_s > 0) this.writes.add(now.elapsed_ms, now.dirty_pages_per_s * PAGE);
      this.faults.update(now);
    }
    const still = pause(now);
    for (const curve of [this.rate, this.writes, this.faults.curve]) curve.mark(still);
    this.maps.update(now);
    if (now.outcome.state === "done") this.end.replaceChildren(...report(now));
  }
}

export function migration(page, id) {
  const view = new View(page);
  // Snapshots come faster than the screen shows them: the newest counts.
  let newest = null;
  const draw = () => {
    const now = newest;
    newest = null;
    view.update(now);
  };
  const stop = follow(id, (now) => {
    if (newest === null) requestAnimationFrame(draw);
    newest = now;
    return words.hasEnded(now);
  }, (trouble) => setText(view.state, trouble.message));
  return () => stop();
}
