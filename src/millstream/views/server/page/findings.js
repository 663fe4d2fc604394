// What is slow and why, in sentences.

import { count, duration, measured } from "./format.js";

const PHASES = {
  plan: "planning and waiting for Spark",
  read: "reading, decoding and the steps before the first shuffle",
  stages: "the operators behind shuffles",
  outputs: "writing large outputs",
  collect: "collecting results",
  commit: "the commit to the sinks",
};

const percent = (part, whole) => `${Math.round((part / whole) * 100)} %`;

export function findings(status, load) {
  const out = [];
  if (status.failure) out.push(`It has failed: ${status.failure.kind}. ${status.failure.reason} ${status.failure.advice}`);
  else if (!status.running) out.push("It does not run.");
  const all = status.brokers ? "It had read all there was." : "It has read all there is.";
  out.push(status.unread ? `${count(status.unread)} records are unread.` : all);
  if (status.brokers) out.push(`Its log is ${status.brokers}: what is unread was counted after its last batch.`);
  if (load.arriving_per_s !== null) {
    const rate = (value) => measured(Math.round(value));
    out.push(`${rate(load.arriving_per_s)} records a second arrive, and it reads ${rate(load.read_per_s)}; it is at work ${percent(load.busy, 1)} of the time.`);
    if (status.unread && status.running) out.push(catchUp(load));
  }
  const most = (entries) => entries.reduce((best, one) => (one[1] > best[1] ? one : best), ["", 0]);
  const sum = (entries) => entries.reduce((total, one) => total + one[1], 0);
  const phases = Object.entries(load.phases_ms);
  if (sum(phases)) {
    const [phase, ms] = most(phases);
    out.push(`Of the time of a batch, ${percent(ms, sum(phases))} is ${PHASES[phase]}.`);
  }
  const steps = load.steps.map((step) => [step.step, step.worked_ms]);
  if (sum(steps)) {
    const [step, ms] = most(steps);
    out.push(`The step that works longest is ${step}: ${percent(ms, sum(steps))} of the work of all steps.`);
  }
  return out;
}

function catchUp({ catch_up: { seconds, never }, capacity }) {
  if (seconds !== null) return `At the rate of its fullest batches it catches up in ${duration(Math.max(1, seconds))}.`;
  if (!never) return `When it catches up is not known yet: no batch had more than ${count(capacity.records)} records, and the next one will have more.`;
  return "At the rate of its fullest batches it never catches up: more arrives than it can process. Give it more cores or partitions (millstream rescale), or make the slowest step cheaper.";
}
