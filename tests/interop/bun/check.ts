/**
 * What every interop script shares: the connection under test, named checks and bounded waiting.
 *
 * Rules: a script prints one JSON line per check and leaves with 1 when any of them failed. A check uses queues
 * of its own (`queueName`), waits for conditions and never for fixed times, and may take CHECK_LIMIT_MS at most,
 * so that a server which stops answering is reported by the name of the check that noticed.
 */
import { Queue, QueueEvents, Worker } from 'bunqueue/client';
import type { Job, JobOptions, ManualJob, Processor, QueueOptions, WorkerOptions } from 'bunqueue/client';

const CHECK_LIMIT_MS = 20_000;
const [host = '127.0.0.1', port = '6789', token = ''] = process.argv.slice(2);

export const address = { host, port: Number(port) };
export const connection = token ? { ...address, token } : address;
export const authToken = token;

type Closable = { close(): unknown };
const opened: Closable[] = [];
const run = `${process.pid.toString(36)}${Date.now().toString(36)}`;
let queueCount = 0;
let failures = 0;

/** Close `resource` when the current check ends, whatever its outcome. */
export function closing<T extends Closable>(resource: T): T {
  opened.push(resource);
  return resource;
}

export function queueName(theme: string): string {
  return `interop-${theme}-${run}-${++queueCount}`;
}

export function openQueue<T = any>(name: string, options: QueueOptions = {}): Queue<T> {
  return closing(new Queue<T>(name, { embedded: false, connection, ...options }));
}

export function openWorker<T = any, R = any>(
  name: string,
  processor: Processor<T, R>,
  options: WorkerOptions = {},
): Worker<T, R> {
  const worker = new Worker<T, R>(name, processor, { embedded: false, connection, ...options });
  worker.on('error', () => undefined); // an EventEmitter without a listener would end the process
  return closing(worker);
}

export async function openEvents(name: string): Promise<QueueEvents> {
  const events = closing(new QueueEvents(name, { embedded: false, connection }));
  await events.waitUntilReady();
  return events;
}

/** A worker that takes jobs only when asked: the way to hold a job active for as long as a check wants. */
export function handWorker(name: string, options: WorkerOptions = {}): Worker {
  return openWorker(name, async () => undefined, { autorun: false, ...options });
}

export async function take(worker: Worker): Promise<ManualJob & { token: string }> {
  const job = await worker.getNextJob();
  if (!job) fail('the queue handed out no job');
  return job as ManualJob & { token: string };
}

export async function completeNext(queue: Queue, worker: Worker, result: unknown = null): Promise<string> {
  const job = await take(worker);
  await queue.moveJobToCompleted(String(job.id), result, job.token);
  return String(job.id);
}

/** Take the next job and fail it for good. */
export async function buryNext(queue: Queue, worker: Worker, message = 'buried'): Promise<string> {
  const { UnrecoverableError } = await import('bunqueue/client');
  const job = await take(worker);
  await queue.moveJobToFailed(String(job.id), new UnrecoverableError(message), job.token);
  return String(job.id);
}

export async function check(name: string, body: () => Promise<void>): Promise<void> {
  const first = opened.length;
  let detail: unknown = '';
  let ok = true;
  try {
    await within(CHECK_LIMIT_MS, body());
  } catch (error) {
    ok = false;
    failures++;
    detail = error instanceof Error ? error.message : String(error);
  }
  console.log(JSON.stringify({ check: name, ok, detail }));
  for (const resource of opened.splice(first).reverse()) {
    await within(5_000, Promise.resolve(resource.close())).catch(() => undefined);
  }
}

/** End the process: the client keeps sockets and timers that would hold it open. */
export function finish(): never {
  process.exit(failures === 0 ? 0 : 1);
}

export function fail(message: string): never {
  throw new Error(message);
}

export function same(actual: unknown, expected: unknown, what: string): void {
  if (!Bun.deepEquals(actual, expected)) fail(`${what}: expected ${show(expected)}, got ${show(actual)}`);
}

export function holds(condition: unknown, what: string): void {
  if (!condition) fail(what);
}

/** Assert that `promise` is rejected, and with a message that matches. */
export async function refused(promise: Promise<unknown>, pattern: RegExp, what: string): Promise<void> {
  const outcome = await promise.then(
    (value) => ({ value }),
    (error: unknown) => ({ error: error instanceof Error ? error.message : String(error) }),
  );
  if (!('error' in outcome)) return fail(`${what}: expected a refusal, got ${show(outcome.value)}`);
  if (!pattern.test(outcome.error)) fail(`${what}: expected ${pattern}, got ${show(outcome.error)}`);
}

export async function eventually(
  condition: () => unknown,
  what: string,
  limitMs = 8_000,
): Promise<void> {
  const deadline = Date.now() + limitMs;
  while (!(await condition())) {
    if (Date.now() > deadline) fail(`not within ${limitMs} ms: ${what}`);
    await Bun.sleep(10);
  }
}

/** Assert that `condition` keeps failing for a while: for things that must not happen. */
export async function never(condition: () => unknown, what: string, forMs = 300): Promise<void> {
  const deadline = Date.now() + forMs;
  while (Date.now() < deadline) {
    if (await condition()) fail(what);
    await Bun.sleep(10);
  }
}

export function ids(jobs: Pick<Job, 'id'>[]): string[] {
  return jobs.map((job) => job.id).sort();
}

export async function addNamed(queue: Queue, names: string[], options: JobOptions = {}): Promise<string[]> {
  const jobs = await queue.addBulk(names.map((name) => ({ name, data: { name: `data-${name}` }, opts: options })));
  return jobs.map((job) => job.id);
}

async function within<T>(limitMs: number, work: Promise<T>): Promise<T> {
  let timer: ReturnType<typeof setTimeout> | undefined;
  const limit = new Promise<never>((_, reject) => {
    timer = setTimeout(() => reject(new Error(`took longer than ${limitMs} ms`)), limitMs);
  });
  return Promise.race([work, limit]).finally(() => clearTimeout(timer));
}

function show(value: unknown): string {
  return JSON.stringify(value, (_, part) => (part === undefined ? '(undefined)' : part));
}
