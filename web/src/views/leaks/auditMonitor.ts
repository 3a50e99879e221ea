/** Starts an audit and asks how far it is, also while another view is open. */

import type { AuditAnswer, AuditParams, Budget } from "../../api.ts";
import { Store } from "../../store.ts";
import { errorMessage } from "../../transport/transport.ts";

const POLL_MS = 500;
const LOST =
  "The process of the audit has ended, perhaps for lack of memory. Start it again, or run `keepleft audit`.";

export interface AuditState {
  budget: Budget;
  answer: AuditAnswer | null;
  error: string;
  isRunning: boolean;
}

export class AuditMonitor {
  readonly state = new Store<AuditState>({ budget: "quick", answer: null, error: "", isRunning: false });
  private readonly client = Math.random().toString(36).slice(2);
  private timer: ReturnType<typeof setTimeout> | undefined;
  private run = 0; // answers to an earlier run are dropped, and do not poll again

  constructor(private readonly ask: (params: AuditParams) => Promise<AuditAnswer>) {}

  /** Take an answer as it is, from a file that holds one. */
  async show(): Promise<void> {
    try {
      this.update({ answer: await this.ask({ wait: false }) });
    } catch (error) {
      this.update({ error: errorMessage(error) });
    }
  }

  choose(budget: Budget): void {
    if (!this.state.get().isRunning) this.update({ budget });
  }

  start(): void {
    this.cancelPolling();
    this.update({ answer: null, error: "", isRunning: true });
    void this.poll(this.run, "start");
  }

  /** Leave the audit: it ends, unless another page watches it. What it has found so far stays. */
  stop(): void {
    const { isRunning, budget, answer } = this.state.get();
    if (!isRunning) return;
    this.cancelPolling();
    const stopped = answer?.progress === undefined ? null : { ...answer, state: "stopped" as const };
    this.update({ isRunning: false, answer: stopped });
    this.ask({ budget, action: "stop", client: this.client }).catch(() => undefined);
  }

  private cancelPolling(): void {
    this.run++;
    clearTimeout(this.timer);
  }

  private update(changes: Partial<AuditState>): void {
    this.state.set({ ...this.state.get(), ...changes });
  }

  private async poll(run: number, action: "start" | "poll"): Promise<void> {
    let answer: AuditAnswer;
    try {
      answer = await this.ask({ budget: this.state.get().budget, action, client: this.client });
    } catch (error) {
      if (run === this.run) this.update({ error: errorMessage(error), isRunning: false });
      return;
    }
    if (run !== this.run) return;
    if (answer.state === "none") {
      this.update({ error: LOST, isRunning: false });
      return;
    }
    const isRunning = ["waiting", "running", "stopping"].includes(answer.state);
    this.update({ answer, isRunning });
    if (!isRunning) return;
    // one that waits for another asks for its own until it is its turn
    const next = answer.state === "waiting" ? "start" : "poll";
    this.timer = setTimeout(() => void this.poll(run, next), POLL_MS);
  }
}
