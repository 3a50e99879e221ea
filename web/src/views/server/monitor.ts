/** Asks the server once a second what it is doing, while somebody looks. */

import type { ServerStatus } from "../../api.ts";
import { Store } from "../../store.ts";
import { errorMessage } from "../../transport/transport.ts";
import { addStatus, EMPTY_HISTORY, type History } from "./history.ts";

const POLL_MS = 1000;
const RETRY_MS = 3000; // after an error

export interface MonitorState {
  history: History;
  error: string; // of the last attempt
}

export class ServerMonitor {
  readonly state = new Store<MonitorState>({ history: EMPTY_HISTORY, error: "" });
  private timer: ReturnType<typeof setTimeout> | undefined;
  private run = 0; // answers to an earlier run are dropped, and do not poll again

  constructor(private readonly read: () => Promise<ServerStatus>) {}

  start(): void {
    this.stop();
    void this.poll(this.run);
  }

  stop(): void {
    this.run++;
    clearTimeout(this.timer);
  }

  private async poll(run: number): Promise<void> {
    let next: MonitorState;
    try {
      const status = await this.read();
      next = { history: addStatus(this.state.get().history, status), error: "" };
    } catch (error) {
      next = { history: this.state.get().history, error: errorMessage(error) };
    }
    if (run !== this.run) return;
    this.timer = setTimeout(() => void this.poll(run), next.error === "" ? POLL_MS : RETRY_MS);
    this.state.set(next);
  }
}
