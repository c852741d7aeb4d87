/** What the package builds on queues and workers: groups of queues, sandboxes, forwarding, simple mode, workflows. */
import { Bunqueue, QueueGroup, SandboxedWorker } from 'bunqueue/client';
import { Engine, Workflow } from 'bunqueue/workflow';
import { check, closing, connection, eventually, finish, openQueue, queueName, same } from './check';

const remote = { embedded: false, connection };

await check('a group of queues is paused, drained and obliterated together', async () => {
  const group = new QueueGroup(queueName('group'));
  const [first, second] = ['a', 'b'].map((name) => closing(group.getQueue(name, remote)));
  await first!.add('n', {});
  await second!.add('n', {}, { delay: 60_000 });
  await group.pauseAllAsync();
  same([await first!.isPausedAsync(), await second!.isPausedAsync()], [true, true], 'paused');
  await group.resumeAllAsync();
  const worker = closing(group.getWorker('a', async () => 'done', remote));
  await eventually(async () => (await first!.getCompletedCount()) === 1, 'its worker runs');
  await worker.close();
  same(await group.drainAllAsync(), 1, 'drained');
  await group.obliterateAllAsync();
  same(await first!.getCompletedCount(), 0, 'nothing is left');
});

await check('a sandboxed worker runs, reports and fails jobs in its own process', async () => {
  const name = queueName('sandbox');
  const queue = openQueue(name);
  const processor = new URL('./sandboxed.ts', import.meta.url).pathname;
  const worker = new SandboxedWorker(name, { processor, connection });
  closing({ close: () => worker.stop() });
  await worker.start();
  const good = await queue.add('good', { n: 2 });
  const bad = await queue.add('bad', { n: 0 }, { attempts: 1 });
  await eventually(async () => (await queue.getJobState(good.id)) === 'completed', 'completed');
  await eventually(async () => (await queue.getJobState(bad.id)) === 'failed', 'failed');
  same((await queue.getJob(good.id))!.returnvalue, { half: 1 }, 'result');
  same((await queue.getJob(bad.id))!.failedReason, 'nothing to halve', 'reason');
});

await check('a forwarder moves jobs to another queue', async () => {
  const [from, to] = [openQueue(queueName('from')), openQueue(queueName('to'))];
  const forwarder = closing(from.forward({ to: connection, queue: to.name }));
  forwarder.on('error', () => undefined);
  await from.add('hop', { n: 1 }, { priority: 3 });
  await eventually(async () => (await to.countAsync()) === 1, 'arrived');
  const [job] = await to.getJobsAsync({ end: -1 });
  same([job!.name, job!.data, job!.priority], ['hop', { n: 1 }, 3], 'what arrived');
});

await check('simple mode routes, triggers and schedules', async () => {
  const seen: unknown[] = [];
  const app = closing(new Bunqueue<any, any>(queueName('simple'), {
    ...remote,
    routes: {
      first: async () => 'result',
      second: async (job) => void seen.push(job.data),
    },
    dlq: { maxEntries: 5 },
  }));
  app.on('error', () => undefined);
  app.trigger({ on: 'first', create: 'second', data: (result) => ({ result }) });
  await app.add('first', {});
  await eventually(() => seen.length === 1, 'triggered');
  same(seen, [{ result: 'result' }], 'what was triggered');
  same((await app.every('beat', 60_000))!.every, 60_000, 'schedule');
  same((await app.listCrons()).map((entry) => entry.id), ['beat'], 'schedules');
  same(await app.removeCron('beat'), true, 'removed');
});

await check('a workflow runs its steps, and undoes them when one fails', async () => {
  const trace: string[] = [];
  const engine = closing(new Engine({ ...remote, queueName: queueName('workflow') }));
  engine.register(new Workflow<{ n: number }>('sum')
    .step('one', async (context) => ({ x: context.input.n + 1 }))
    .step('two', async (context) => ({ y: (context.steps.one as { x: number }).x * 2 })));
  engine.register(new Workflow('undone')
    .step('one', async () => 1, { compensate: async () => void trace.push('undo') })
    .step('two', async () => { throw new Error('no'); }, { retry: 1 }));
  const sum = await engine.start('sum', { n: 1 });
  await eventually(() => engine.getExecution(sum.id)?.state === 'completed', 'completed');
  same(engine.getExecution(sum.id)!.steps.two!.result, { y: 4 }, 'result of the last step');
  const undone = await engine.start('undone', {});
  await eventually(() => engine.getExecution(undone.id)?.state === 'failed', 'failed', 15_000);
  same(trace, ['undo'], 'compensated');
});

finish();
