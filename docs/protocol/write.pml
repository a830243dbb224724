/* WRITE: one transfer between a producer P and a consumer D, with one fault. See README.md. */
#include "common.pml"

#define LAYERS 2

mtype = { none, computing, pushing, stopping, flushed, released, expired, failed };
mtype = { expecting, failing, cancelling, published, over };

mtype p = none;
mtype d = expecting;
bool p_holds;              /* P's blocks belong to the transfer */
bool d_owns = true;        /* D's blocks belong to the import */
bool cancelled_early;      /* a Cancel came before the request, and is remembered */
bool acked;                /* D's ACK has come to P */
byte computed, posted, landed, reported;
bool op_error, op_lost;
bool fenced;               /* D has torn down what a dead P may have left behind */
mtype notice = none;       /* what P has to tell, until it is acknowledged */
mtype cause = failure;
bool ack_owed, ack_confirmed, cancel_owed;

chan call = [2] of { mtype };
chan reply = [1] of { mtype };
mtype = { ask, cancel_call, done, refused };

inline stop(why)
{
  if
  :: p == computing -> p = failed; p_holds = false; notice = why; notice_sent = false
  :: p == pushing -> p = stopping; cause = why
  :: else
  fi
}

active proctype Producer()
{
end:
  do
  :: atomic { !p_dead && call?[ask] -> call?ask;
       if
#ifndef M_FORGET_CANCEL
       :: cancelled_early -> p = failed; reply!refused
       :: !cancelled_early -> p = computing; p_holds = true
#else
       :: p = computing; p_holds = true
#endif
       fi }
  :: atomic { !p_dead && call?[cancel_call] -> call?cancel_call; stop(failure) }
  :: atomic { !p_dead && (p == computing || p == pushing) && computed < LAYERS ->
       computed++; posted++; p = pushing;
       if
       :: computed == LAYERS && empty(reply) -> reply!done
       :: computed < LAYERS || full(reply)
       fi }
#ifdef M_POST_AFTER_END
  :: atomic { !p_dead && p == failed && computed < LAYERS -> computed++; posted++ }
#endif
  :: atomic { !p_dead && (p == computing || p == pushing) && computed < LAYERS -> stop(failure);
       if :: nfull(reply) -> reply!refused :: full(reply) fi }
#ifdef M_COMMIT_EARLY
  :: atomic { !p_dead && p == pushing && computed == LAYERS ->
#else
  :: atomic { !p_dead && p == pushing && computed == LAYERS && reported == posted && !op_error ->
#endif
       p = flushed; p_holds = false; notice = commit; notice_sent = false }
  :: atomic { !p_dead && p == pushing && op_error -> p = stopping; cause = failure }
#ifdef M_STOP_EARLY
  :: atomic { !p_dead && p == stopping ->
#else
  :: atomic { !p_dead && p == stopping && reported == posted ->
#endif
       p = failed; p_holds = false; notice = cause; notice_sent = false }
  :: atomic { !p_dead && notice != none && !acked && !notice_sent && nfull(to_d) ->
       notice_sent = true; to_d!notice }
  :: atomic { !p_dead && to_p?[cancel] -> to_p?cancel;
       if
       :: p == none -> cancelled_early = true; if :: nfull(to_d) -> to_d!stopped :: full(to_d) fi
       :: p == computing || p == pushing -> stop(stopped)
       :: p == stopping
       :: else ->   /* its end is told again, or that nothing is written */
            if
            :: notice != none && !acked -> notice_sent = false
            :: (notice == none || acked) && nfull(to_d) -> to_d!stopped
            :: (notice == none || acked) && full(to_d)
            fi
       fi }
  :: atomic { !p_dead && to_p?[ack] -> to_p?ack;
       if :: p == flushed -> p = released :: else fi;
       if :: p == computing || p == pushing -> stop(stopped) :: else fi;
       acked = true;
       if :: nfull(to_d) -> to_d!ack_reply :: full(to_d) fi }
  :: atomic { !p_dead && p_lease_over && (p == computing || p == pushing) -> stop(failure) }
  :: atomic { !p_dead && p_lease_over && p == flushed -> p = expired }
  od
}

inline end_import(to) { d = to; d_owns = false; ack_owed = true; cancel_owed = false }

inline settle()
{
  if
  :: d == expecting || d == failing || d == cancelling -> end_import(over)
  :: else
  fi
}

active proctype Consumer()
{
  bool client_left = false;
  call!ask;
end:
  do
  :: atomic { !d_dead && to_d?[commit] -> to_d?commit;
       if
       :: d == expecting -> assert(landed == LAYERS); end_import(published)
       :: else -> settle()
       fi }
  :: atomic { !d_dead && to_d?[failure] -> to_d?failure; settle() }
  :: atomic { !d_dead && to_d?[stopped] -> to_d?stopped; settle() }
  :: atomic { !d_dead && reply?[refused] -> reply?refused;
       if :: d == expecting -> d = cancelling; cancel_owed = true :: else fi }
  :: atomic { !d_dead && reply?[done] -> reply?done }
  :: atomic { !d_dead && d == expecting && !client_left ->
       client_left = true; d = cancelling; cancel_owed = true;
       if :: nfull(call) -> call!cancel_call :: full(call) fi;
#ifdef M_FREE_AT_CANCEL
       d_owns = false;
#endif
     }
  /* It takes too long (only after a fault, or the model would wait for nothing): ask, and wait for the answer. */
  :: atomic { !d_dead && d == expecting && !fault_left -> d = failing; cancel_owed = true;
#ifdef M_FREE_AT_TIMEOUT
       d_owns = false;
#endif
     }
  :: atomic { !d_dead && cancel_owed && !cancel_sent && nfull(to_p) -> cancel_sent = true; to_p!cancel }
  :: atomic { !d_dead && p_known_dead && !fenced && (d == expecting || d == failing || d == cancelling) ->
       d = failing;
#ifndef M_NO_FENCE
       fenced = true;
#endif
       end_import(over) }
  :: atomic { !d_dead && ack_owed && !ack_confirmed && !ack_sent && nfull(to_p) -> ack_sent = true; to_p!ack }
  :: atomic { !d_dead && to_d?[ack_reply] -> to_d?ack_reply; ack_confirmed = true }
  od
}

active proctype Fabric()
{
end:
  do
  /* What a dead P has posted may still land, until D has fenced it. */
  :: atomic { landed < posted && !fenced ->
       assert(d_owns || d_dead); landed++ }
  :: atomic { reported < landed && !op_lost -> reported++ }
  :: atomic { fault_left && reported < posted -> fault_left--; op_error = true; landed = posted; reported = posted }
  /* A completion is never heard of: P's own deadline tears the connection down, and what was posted is over. */
  :: atomic { fault_left && reported < landed -> fault_left--; op_lost = true }
  :: atomic { op_lost && reported < posted && landed == posted -> reported = posted; op_error = true }
  od
}

active proctype Faults()
{
end:
  do
  :: disconnect_or_duplicate()
  :: atomic { fault_left -> fault_left--; p_dead = true; died = true }
  :: atomic { fault_left -> fault_left--; d_dead = true; died = true }
  :: atomic { p_dead && !p_known_dead -> p_known_dead = true }
  :: atomic { fault_left -> fault_left--; d_lease_over = true; silence = true }
  :: atomic { (d_lease_over || d_dead) && !p_lease_over -> p_lease_over = true }
  od
}

active proctype Judge()
{
  timeout;
  assert(p_dead || !p_holds);
  assert(d_dead || !d_owns);
  assert(d_dead || d == published || d == over);
  assert(p_dead || p == released || p == expired || p == failed || p == none);
  assert(died || silence || p != expired);
  assert(died || !ack_owed || ack_confirmed)
}
