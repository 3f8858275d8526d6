// Numbers, times and states, as people say them. The same units as the commands have.

const BYTES = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

/** 1536 becomes "1.50 KiB". */
export function bytes(count) {
  let unit = 0;
  for (; count >= 1024 && unit < BYTES.length - 1; unit += 1) count /= 1024;
  return `${unit === 0 ? count : count.toFixed(2)} ${BYTES[unit]}`;
}

/** Bytes per second. */
export function rate(bytesPerSecond) {
  return `${bytes(Math.floor(bytesPerSecond))}/s`;
}

/** Milliseconds: "4.2 ms", "1.50 s", "2m 05s", "1h 02m". */
export function time(ms) {
  if (ms < 1000) return `${ms.toFixed(1)} ms`;
  if (ms < 60_000) return `${(ms / 1000).toFixed(2)} s`;
  const seconds = Math.floor(ms / 1000);
  const two = (number) => String(number).padStart(2, "0");
  if (seconds < 3600) return `${Math.floor(seconds / 60)}m ${two(seconds % 60)}s`;
  return `${Math.floor(seconds / 3600)}h ${two(Math.floor((seconds % 3600) / 60))}m`;
}

/** Microseconds. */
export function micros(us) {
  return us < 1000 ? `${us.toFixed(0)} us` : time(us / 1000);
}

/** 12345.6 becomes "12,346". */
export function count(number) {
  return Math.round(number).toLocaleString("en");
}

/** A date of a daemon, as RFC 3339 or milliseconds since 1970, in the time zone of the browser; "-" if it is not known. */
export function date(when) {
  return when ? new Date(when).toLocaleString("sv") : "-";
}

/** "3 children", "1 child". */
export function number(of, one, many = `${one}s`) {
  return `${count(of)} ${of === 1 ? one : many}`;
}

const GUEST = {
  source: "the guest is at the source",
  destination: "the guest is at the destination",
  "paused-at-source": "the guest is paused at the source and needs vmove recover",
  "paused-at-destination": "the guest is paused at the destination and needs vmove recover",
  unknown: "where the guest is cannot be read",
};

/** How a migration stands, in a sentence. */
export function outcome({ outcome: at, phase }) {
  switch (at.state) {
    case "running": return phase;
    case "reconnecting": return `${phase}, lost its peer: ${at.error}`;
    case "done": return at.report.downtime_ms > 0 ? `done, downtime ${time(at.report.downtime_ms)}` : "done";
    case "refused": return `refused: ${number(at.blockers.length, "blocker")}`;
    case "failed": return `${at.cancelled ? "cancelled" : "failed"}; ${GUEST[at.guest] ?? at.guest}`;
    default: return at.state;
  }
}

/** Whether nothing more is to come of a migration. */
export function hasEnded(progress) {
  return !["running", "reconnecting"].includes(progress.outcome.state);
}

/** "to b", "from a". */
export function peer(progress) {
  return `${progress.role === "source" ? "to" : "from"} ${progress.peer}`;
}

/** How a plan or a step of it stands. */
export function planState({ is, reason }) {
  return reason ? `${is}: ${reason}` : is;
}

/** Cores that a lease holds for a VM on a node. */
export function cores(held) {
  return (held.shares ?? []).reduce((sum, share) => sum + share.cores, 0);
}

/** Memory that a lease holds for a VM on a node, with huge pages. Unit: bytes. */
export function memory(held) {
  const mib = (held.shares ?? []).reduce((sum, share) =>
    sum + share.memory + 2 * (share.huge?.pages_2m ?? 0) + 1024 * (share.huge?.pages_1g ?? 0), 0);
  return mib * 1024 * 1024;
}
