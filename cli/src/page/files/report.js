// What a migration that has ended says of itself.

import { element, Facts, section, spans, Table } from "./drawing.js";
import * as words from "./words.js";

const faults = ({ faults: of }) => of.fetched === 0 ? `${words.count(of.count)}, none fetched a page`
  : `${words.count(of.count)}, ${words.count(of.fetched)} fetched a page: median ${words.micros(of.p50_us)}, 99 % within ${words.micros(of.p99_us)}, longest ${words.micros(of.max_us)}`;

/** What the destination knows. */
function ownFigures(report) {
  const facts = new Facts();
  facts.update([["In all", words.time(report.total_ms)], ["Faults", faults(report)]]);
  const elsewhere = `Downtime, rounds and bytes are told at ${report.source || "the source"}.`;
  return element("div", {}, facts.element, element("p", { class: "none" }, elsewhere));
}

function figures(report) {
  const facts = new Facts();
  const error = report.downtime_error_ms > 0 ? ` ± ${words.time(report.downtime_error_ms)}` : "";
  facts.update([
    ["Downtime", report.downtime_ms > 0 ? words.time(report.downtime_ms) + error : "none: the guest was paused before"],
    ["In all", words.time(report.total_ms)],
    ["Before the first page", words.time(report.setup_ms)],
    ["Sent", `${words.bytes(report.bytes_sent)}, of which device state ${words.bytes(report.state_bytes)}`],
    ["Pages", `${words.count(report.pages_total)}, of which zero ${words.count(report.pages_zero)}, after the guest resumed ${words.count(report.pages_after_resume)}`],
    ["Faults", faults(report)],
    ["Mode", `${report.mode}: ${report.mode_reason}`],
    ["Rounds ended since", report.rounds_reason],
    ["Fabric", `${report.fabric}: ${report.fabric_reason}`],
    ["Verified", report.verified === null ? null : report.verified ? "every page is the same on both sides" : "pages differ"],
    ["Recoveries", report.recoveries || null],
    ["Processors", processors(report.host_cpu)],
    ...(report.verdict ?? []).map((verdict) => [`Goal ${verdict.goal} ${inUnit(verdict, verdict.wanted)}`,
      verdict.kept === null ? "not measured" : `${verdict.kept ? "kept" : "missed"}: ${inUnit(verdict, verdict.measured)}`]),
  ]);
  return facts.element;
}

function inUnit(verdict, value) {
  return verdict.unit === "percent" ? `${value.toFixed(1)} %` : words.time(value);
}

function processors(used) {
  const host = (name, of) => of ? [`${name} ${of.percent.toFixed(1)} % (${words.time(of.cpu_ms)})`] : [];
  return [...host("source", used?.source), ...host("destination", used?.destination)].join(", ") || null;
}

function rounds(report) {
  const columns = [["Round"], ["Pages", "number"], ["Zero", "number wide"], ["Time", "number"], ["Guest wrote", "number"]];
  const cells = ([index, round]) => [String(index + 1), words.count(round.pages), words.count(round.zero), words.time(round.duration_ms),
    `${words.count(round.dirty_pages_per_s)} pages/s`];
  const table = new Table("Rounds", columns, ([index]) => index, cells, "No rounds.");
  table.update([...report.rounds.entries()]);
  return table.element;
}

function slowest(report) {
  const columns = [["At"], ["All", "number"], ["Asked", "number wide"], ["Read", "number"], ["Mapped", "number wide"], ["Page", "wide"]];
  const cells = ([, fault]) => [words.time(fault.at_ms), words.micros(fault.total_us), words.micros(fault.asked_us),
    words.micros(fault.read_us), words.micros(fault.map_us), `${fault.block} + 0x${fault.offset.toString(16)}`];
  const table = new Table("Slowest faults", columns, ([index]) => index, cells, "No fault fetched a page.");
  table.update([...(report.slowest_faults ?? []).entries()]);
  return table.element;
}

function requests(disks) {
  const periods = ["before", "during", "after"];
  const columns = [["Disk"], ["Requests"], ...periods.map((period) => [period[0].toUpperCase() + period.slice(1), "number"])];
  const made = (disk, kind) => periods.some((period) => disk.latency?.[period]?.[kind]);
  const rows = disks.flatMap((disk) => ["reads", "writes"].filter((kind) => made(disk, kind)).map((kind) => [disk, kind]));
  const cell = (io, kind) => !io ? "unknown" : io[kind] ? `${words.micros(io[kind].mean_ms * 1000)} (${words.count(io[kind].requests)})` : "none";
  const cells = ([disk, kind]) => [disk.name, kind, ...periods.map((period) => cell(disk.latency[period], kind))];
  const table = new Table("Disks: mean time of the guest's requests", columns, ([disk, kind]) => `${disk.name} ${kind}`, cells, "None.");
  table.update(rows);
  return table.element;
}

/** In these phases the guest stands still. */
export const STILL = ["switchover", "hand-over"];

const spansOf = (title, parts, still) => parts.length === 0 ? element("p", { class: "none" }, "Not known.")
  : spans(title, parts.map((part) => [part.name, part.start_ms, part.duration_ms, still(part.name)]), words.time);

/** The elements of a report. A destination that has lost its source knows the phases and the faults only. */
export function report({ outcome: { report: of } }) {
  const phases = section("Phases", spansOf("From the request to the end", of.phases, (name) => STILL.includes(name)));
  const slow = section("Slowest faults", slowest(of));
  if (of.pages_total === 0) return [section("Result", ownFigures(of)), phases, slow];
  return [section("Result", figures(of)), phases, section("Pause", spansOf("From STOP to RESUME", of.pause, () => true)),
    section("Rounds", rounds(of)), ...(of.disks?.length > 0 ? [section("Requests to disks", requests(of.disks))] : []), slow];
}
